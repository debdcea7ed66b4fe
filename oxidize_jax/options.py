"""What a user chooses, and how it becomes an EngineConfig for this machine."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import os
import tomllib
from pathlib import Path
from typing import Any

import jax

from oxidize_jax.config import EngineConfig
from oxidize_jax.messages import reason, short_repr
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.kv_cache import kv_shape
from oxidize_jax.types import BLOCK_SIZE

DEFAULT_MODEL = "smollm2-135m-instruct"
DTYPES = ("auto", "float32", "bfloat16", "int8")
KV_DTYPES = ("auto", "float32", "bfloat16")
_CPU_KV_LIMIT = 2 * 2**30
_GIB = 2**30
_CPU_TILE = 32
"""Prompt tokens that attend together: on CPUs larger products pay for the padding (512 tokens
of SmolLM2 in one step took 14 % less time than with 16, and 24 % less at a context of 1,024)."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of :class:`~oxidize_jax.llm.LLM`; names follow vLLM's ``EngineArgs``."""

    model: str = DEFAULT_MODEL
    """A built-in name, a Hugging Face folder or repo id, a ``.gguf`` file or a saved model."""
    tokenizer: str | None = None
    """Folder or ``.gguf`` to take the tokenizer from; default: the model's own."""
    dtype: str = "auto"
    """Of weights and matmul inputs. ``auto``: float32 on a CPU without AMX, else bfloat16; of a
    saved model the one it was saved in, which is the only one it can be run in.
    ``int8`` halves bfloat16's memory once more at some loss, so it is never chosen unasked."""
    kv_cache_dtype: str = "auto"
    """Of the KV cache. ``auto``: as ``dtype``, and bfloat16 where that is int8."""
    attention: str = "gather"
    """Attention backend."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; default: the model's context length."""
    max_num_seqs: int = 16
    """Sequences that run at the same time."""
    max_num_batched_tokens: int = 512
    """Token budget of one step."""
    block_size: int = BLOCK_SIZE
    """Tokens in a KV block."""
    num_blocks: int | None = None
    """KV blocks; default: what ``max_num_seqs`` full sequences need, within
    ``kv_cache_gib``."""
    kv_cache_gib: float | None = None
    """Memory for the KV cache in GiB; default: 2 GiB or half of the free memory on a CPU,
    whichever is less, and 90 % of the device's free memory elsewhere."""
    policy: str = "prefill_first"
    """``prefill_first`` or ``decode_first``."""
    enable_prefix_caching: bool = True
    """Share the KV of equal prompt beginnings."""
    max_logprobs: int = 5
    """Most alternatives per token that a request may ask for."""
    max_logit_bias: int = 300
    """Most token ids in the ``logit_bias`` of a request."""
    max_bad_words: int = 32
    """Most token sequences that the ``bad_words`` of a request may make: two for most words, at
    the start of a text and behind a space."""
    deterministic: bool = False
    """A request's tokens and logprobs are the same bits whatever shares its batch; see
    :class:`~oxidize_jax.config.EngineConfig`. Steps take at most 32 tokens, or ``max_num_seqs``
    rounded up to a multiple of that, and all cost as much as the largest."""
    seed: int = 0
    """Seeds of requests that name none are drawn from this one."""
    check_invariants: bool = False
    """Check the whole state after every dispatch (slow; to hunt a fault)."""
    trace: str | None = None
    """File to record every event of the engine in, for ``oxidize-jax replay``. It holds the
    prompts, as token ids."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _plain(getattr(self, field.name))
            _check_type(field.name, value, str(field.type))
            object.__setattr__(self, field.name, value)
        for name, dtypes in (("dtype", DTYPES), ("kv_cache_dtype", KV_DTYPES)):
            if getattr(self, name) not in dtypes:
                raise ValueError(
                    f"{name}={short_repr(getattr(self, name))}: must be one of {', '.join(dtypes)}."
                )
        gib = self.kv_cache_gib
        if gib is not None and not 0 < gib < float("inf"):
            raise ValueError(f"kv_cache_gib={short_repr(gib)}: must be a positive number of GiB.")
        if self.seed < 0:
            raise ValueError(f"seed={short_repr(self.seed)}: must be a whole number, 0 or more.")


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str, os.PathLike), "text (in quotes, in a TOML file)"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
}


def _plain(value: Any) -> Any:
    """A Python number for a whole number of another kind, such as numpy's; text for a path."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return value


def _check_type(name: str, value: Any, annotation: str) -> None:
    kind = annotation.removesuffix(" | None")
    if value is None and kind != annotation:
        return
    types, words = _KINDS[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        raise ValueError(f"{name}={short_repr(value)}: must be {words}.")


def load_options(path: str | Path) -> dict[str, Any]:
    """Read the keys of a TOML preset, of all its tables, as arguments of :class:`Options`.

    Raises ValueError naming the file and an unknown key, with the nearest known one.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"config={short_repr(path)}: give the path of a .toml file.")
    path = Path(path).expanduser()
    where = f"config={short_repr(str(path), 200)}"
    try:
        pairs = _flatten(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror or error}; give a .toml file.") from None
    except RecursionError:
        raise ValueError(f"{where}: is nested too deeply; make it flatter.") from None
    except ValueError as error:  # of the syntax, the encoding, or a number of very many digits
        raise ValueError(f"{where}: not valid TOML: {reason(error)}.") from None
    known = {field.name for field in dataclasses.fields(Options)}
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = (
                f" Did you mean {near[0]!r}?"
                if near
                else f" Known keys: {', '.join(sorted(known))}."
            )
            raise ValueError(f"{where}: unknown key {short_repr(key)}.{hint}")
        if key in values:
            raise ValueError(f"{where}: the key {short_repr(key)} stands twice.")
        values[key] = value
    return values


def _flatten(tables: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tables.items():
        pairs += _flatten(value) if isinstance(value, dict) else [(key, value)]
    return pairs


def weight_dtype(options: Options) -> str:
    """``float32``, ``bfloat16`` or ``int8`` for this machine.

    ``auto`` is the fastest type that rounds no more than checkpoints do. That is bfloat16 on
    accelerators, and on CPUs whose AMX multiplies it; other CPUs convert it to float32.
    """
    if options.dtype != "auto":
        return options.dtype
    fast_bfloat16 = jax.default_backend() != "cpu" or "amx_bf16" in _cpu_flags()
    return "bfloat16" if fast_bfloat16 else "float32"


def cache_dtype(options: Options) -> str:
    """Type of keys and values for this machine."""
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    weights = weight_dtype(options)
    return "bfloat16" if weights == "int8" else weights


def _cpu_flags() -> frozenset[str]:
    """Features of this CPU as Linux names them; none where the system does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def engine_config(options: Options, model: ModelConfig, *, reserved: int = 0) -> EngineConfig:
    """Sizes for this model on this machine. Raises ValueError if one sequence cannot fit.

    Of what is free, ``reserved`` bytes are for parameters that are still to be loaded.
    """
    max_len = options.max_model_len
    if max_len is None:
        max_len = model.max_position_embeddings
    elif isinstance(max_len, int) and max_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len={short_repr(max_len)} is more than the "
            f"{model.max_position_embeddings} positions the model was made for: lower it."
        )
    config = EngineConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=max_len,
        block_size=options.block_size,
        num_blocks=1 if options.num_blocks is None else options.num_blocks,
        max_num_requests=_request_slots(options.max_num_seqs),
        policy=options.policy,
        enable_prefix_caching=options.enable_prefix_caching,
        deterministic=options.deterministic,
        max_logprobs=options.max_logprobs,
        max_logit_bias=options.max_logit_bias,
        max_bad_words=options.max_bad_words,
        token_mask_size=model.vocab_size,
        prefill_tile=_CPU_TILE if jax.default_backend() == "cpu" else EngineConfig.prefill_tile,
    )
    if options.num_blocks is None:
        fitting = _fitting_blocks(options, model, config, reserved)
        config = dataclasses.replace(config, num_blocks=fitting)
    _check_memory(options, model, config, reserved)
    return config


def _request_slots(max_num_seqs: Any) -> int:
    """Twice the rows, so that the next requests wait on the device; at least 64."""
    if not isinstance(max_num_seqs, int):
        return 64  # refused by its own name
    return max(64, min(2 * max_num_seqs, 2**31 - 1))


def _check_memory(
    options: Options, model: ModelConfig, config: EngineConfig, reserved: int
) -> None:
    """Refuse sizes whose state is larger than all the memory there is."""
    cache = config.num_blocks * kv_block_bytes(options, model, config.block_size)
    token = 4 * (3 + 2 * config.max_logprobs)
    lists = 8 * config.max_logit_bias + 4 * config.token_mask_words
    lists += 4 * config.max_bad_words * config.max_bad_word_tokens
    requests = config.max_num_requests * (config.max_model_len * token + lists)
    activations = _activation_bytes(model, config)
    free = max(0, free_memory() - reserved)
    if activations > free:
        raise ValueError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} and max_num_seqs="
            f"{config.max_num_seqs} take about {activations / _GIB:.1f} GiB in a step, but "
            f"{free / _GIB:.1f} GiB are free: lower them."
        )
    if cache + requests > free:
        raise ValueError(
            f"num_blocks={config.num_blocks} takes {cache / _GIB:.1f} GiB and max_num_seqs="
            f"{config.max_num_seqs} with max_model_len={config.max_model_len} another "
            f"{requests / _GIB:.1f} GiB, but {free / _GIB:.1f} GiB are free: lower them."
        )


def _activation_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """What the largest step needs at least: one layer's float32 activations, and the logits."""
    heads = model.num_heads + 2 * model.num_kv_heads
    token = 2 * model.hidden_size + 2 * model.intermediate_size + heads * model.head_dim
    samples = min(config.max_num_seqs, config.step_tokens)
    return 4 * (config.step_tokens * token + samples * model.vocab_size)


def _fitting_blocks(
    options: Options, model: ModelConfig, config: EngineConfig, reserved: int
) -> int:
    """Blocks for ``max_num_seqs`` full sequences, or as many as the memory takes."""
    block_bytes = kv_block_bytes(options, model, config.block_size)
    memory = _kv_memory(options, reserved)
    fitting = memory // block_bytes
    if options.kv_cache_gib is None:
        # Free memory is never twice the same, and each number of blocks is compiled anew.
        coarse = fitting - fitting % max(1, 1 << max(0, fitting.bit_length() - 5))
        fitting = coarse if coarse >= config.blocks_per_seq else fitting
    if fitting < 1:
        raise ValueError(
            f"block_size={config.block_size} takes {block_bytes / _GIB:.3g} GiB for one block of "
            f"this model, but {memory / _GIB:.3g} GiB are given to the KV cache: lower block_size "
            "or raise kv_cache_gib."
        )
    if fitting < config.blocks_per_seq:
        need = config.blocks_per_seq * block_bytes / _GIB
        raise ValueError(
            f"max_model_len={config.max_model_len} needs {need:.3g} GiB of KV cache for one "
            f"sequence, but {memory / _GIB:.3g} GiB are given: lower max_model_len to "
            f"{fitting * config.block_size} or raise kv_cache_gib."
        )
    return min(fitting, config.max_num_seqs * config.blocks_per_seq)


def kv_block_bytes(options: Options, model: ModelConfig, block_size: int) -> int:
    """Bytes of one block over all layers, as this machine stores it."""
    size = 4 if cache_dtype(options) == "float32" else 2
    return size * math.prod(kv_shape(model, 1, block_size))


def _kv_memory(options: Options, reserved: int) -> int:
    if options.kv_cache_gib is not None:
        return int(options.kv_cache_gib * _GIB)
    free = max(0, free_memory() - reserved)
    if jax.default_backend() == "cpu":
        return min(_CPU_KV_LIMIT, free // 2)
    return int(0.9 * free)


def free_memory() -> int:
    """Bytes that new arrays can take on the default device."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return _free_host_memory()
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 4 * _GIB) - stats.get("bytes_in_use", 0)


def _free_host_memory() -> int:
    """Bytes that new allocations can take; half of the memory where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 * _GIB
