"""From options to a model in memory, its programs compiled meanwhile.

What is compiled depends on the header of a checkpoint alone, so the two go side by side. The
KV cache is made last: the compiler has then said what a run needs beside it.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from oxidize_jax.checkpoints.fill import parameter_bytes
from oxidize_jax.checkpoints.load import describe_checkpoint, load_checkpoint
from oxidize_jax.checkpoints.resolve import ResolvedModel, resolve_model, saved_folder
from oxidize_jax.checkpoints.saved import is_saved, read_manifest, tokenizer_of
from oxidize_jax.config import EngineConfig
from oxidize_jax.engine.warmup import WarmUp
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.functional import Decoder, build
from oxidize_jax.model.quantize import quantize
from oxidize_jax.model.storage import Leaves
from oxidize_jax.model.transformer import parameter_shapes
from oxidize_jax.options import (
    Options,
    cache_dtype,
    engine_config,
    free_memory,
    kv_block_bytes,
    weight_dtype,
)
from oxidize_jax.progress import progress_bar
from oxidize_jax.text.tokenizer import Tokenizer

_GIB = 2**30
_SHOWN_AFTER_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Started:
    """All that an engine is made of, and the tokenizer."""

    tokenizer: Tokenizer
    tokenizer_path: Path
    """Where it came from, absolute: a process may change its folder."""
    model_config: ModelConfig
    config: EngineConfig
    decoder: Decoder
    params: Leaves


def start(options: Options, *, warm_up: bool, progress: bool) -> Started:
    """Load the model that ``options`` name; with ``warm_up`` compile the engine's programs.

    Raises ValueError in one line for what cannot be used, and where memory is short.
    """
    resolved = resolve_model(options.model)
    tokenizer_path = find_tokenizer(options, resolved).absolute()
    dtype = jnp.dtype(weight_dtype(options))
    model = describe_checkpoint(resolved.path).config
    if model is None:
        load_checkpoint(resolved.path, dtype)  # raises the reason
        raise AssertionError("a model that cannot be described was loaded")
    config = engine_config(options, model, reserved=parameter_bytes(model, dtype))
    model = model.for_sequences(config.max_model_len)
    kinds = {"attention": options.attention, "kv_dtype": cache_dtype(options)}
    decoder, shapes = build(model, abstract_parameters(model, dtype), **kinds)
    warming = WarmUp(config, decoder, shapes) if warm_up else None
    try:
        checkpoint = load_checkpoint(resolved.path, dtype, progress=progress)
        tokenizer = load_tokenizer(tokenizer_path)
        decoder, params = build(model, checkpoint.params, **kinds)
        if warming is not None:
            finish(warming, progress=progress)
            config, warming = _fitted(options, config, decoder, params, warming)
            finish(warming, progress=progress)
    except BaseException:
        if warming is not None:
            warming.cancel()
        raise
    return Started(tokenizer, tokenizer_path, model, config, decoder, params)


def abstract_parameters(model: ModelConfig, dtype: jnp.dtype) -> dict[str, Any]:
    """Shapes and types of the parameters that a loader makes for weights of ``dtype``."""
    quantized = dtype == jnp.int8
    weights = jnp.float32 if quantized else dtype
    shapes = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32 if name.endswith("norm.weight") else weights)
        for name, shape in parameter_shapes(model).items()
    }
    return quantize(shapes) if quantized else shapes


def finish(warming: WarmUp, *, progress: bool) -> None:
    """Wait for the programs; a bar tells of it after a second."""
    begun = time.monotonic()
    with progress_bar(len(warming), shown=progress, unit="program", label="compiling") as bar:
        for count in warming.finish():
            bar.update(count - bar.n)
            # One of them takes most of the time: let the clock go on meanwhile.
            bar.set_postfix_str("", refresh=time.monotonic() - begun > _SHOWN_AFTER_SECONDS)


def _fitted(
    options: Options, config: EngineConfig, decoder: Decoder, params: Leaves, warming: WarmUp
) -> tuple[EngineConfig, WarmUp]:
    """Sizes that fit into what is free now, with what the compiled programs take.

    Only where the first guess was too large the programs are compiled again, for fewer blocks.
    """
    memory, free = warming.memory(), free_memory()
    if memory.total <= free:
        return config, warming
    block_bytes = kv_block_bytes(options, decoder.config, config.block_size)
    fewer = config.num_blocks + (free - memory.total) // block_bytes
    if options.num_blocks is not None or fewer < config.blocks_per_seq:
        raise ValueError(
            f"num_blocks={config.num_blocks} needs {memory.state / _GIB:.3g} GiB for the KV cache "
            f"and all requests, and a step {memory.temporary / _GIB:.3g} GiB, but "
            f"{free / _GIB:.3g} GiB are free beside the model: lower max_model_len, "
            "max_num_seqs, max_num_batched_tokens or num_blocks."
        )
    config = dataclasses.replace(config, num_blocks=fewer)
    return config, WarmUp(config, decoder, params)


def with_saved_dtype(options: Options) -> Options:
    """``options`` whose ``dtype="auto"`` is, of a saved model, the one that it was saved in."""
    folder = saved_folder(options.model)
    if options.dtype != "auto" or folder is None:
        return options
    return dataclasses.replace(options, dtype=read_manifest(folder).dtype)


def find_tokenizer(options: Options, resolved: ResolvedModel) -> Path:
    """The GGUF file or the folder with the tokenizer that ``options`` ask for."""
    path = resolved.path
    if options.tokenizer is not None:
        path = Path(options.tokenizer).expanduser()
        if not path.exists():
            raise ValueError(f"tokenizer={options.tokenizer!r}: there is no such file or folder.")
    return tokenizer_of(path) if is_saved(path) else path


def load_tokenizer(path: Path) -> Tokenizer:
    """What :func:`find_tokenizer` found."""
    return Tokenizer.from_gguf(path) if path.is_file() else Tokenizer.from_hf_folder(path)
