"""GGUF files of the Llama family: configuration, tensors, and the row order undone.

llama.cpp's converter reorders the rows of the query and key projections of ``llama``
models: within a head, the two halves that Hugging Face's rotary embedding pairs up are
interleaved. :func:`rotary_row_map` undoes that, with each projection's own head count.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oxidize_jax.checkpoints.errors import CheckpointError, UnsupportedModelError
from oxidize_jax.checkpoints.gguf_header import GGUFHeader, GGUFTensorInfo, read_gguf_header
from oxidize_jax.checkpoints.stored import OpenCheckpoint, StoredTensor
from oxidize_jax.model.config import ModelConfig

_ROPE_FACTORS = "rope_freqs.weight"

# Keys, below the architecture's name, that change what the model computes, and the values
# with which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "rope.scale_linear": (1.0,),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.type": ("none",),
    "use_parallel_residual": (False,),
}


def open_gguf(path: str | Path) -> OpenCheckpoint:
    """Read and check the header of a GGUF file; no weights are read.

    Raises :class:`CheckpointError` if the file is damaged. A model that cannot be run is
    no error here: ``config`` is then None and ``refusal`` says why.
    """
    header = read_gguf_header(path)
    architecture = str(header.metadata.get("general.architecture", "unknown"))
    tensors = {info.name: _stored_tensor(info, header) for info in header.tensors}
    _check_extents(header, tensors)
    config, refusal, row_maps = None, None, {}
    try:
        config = config_from_gguf(header)
        _check_rope_factors(tensors.get(_ROPE_FACTORS))
        row_maps = _row_maps(config)
    except CheckpointError as error:
        config, refusal = None, error
    context = header.metadata.get(f"{architecture}.context_length")
    return OpenCheckpoint(
        path=header.path,
        format="gguf",
        naming="gguf",
        architecture=architecture,
        context_length=context if isinstance(context, int) else None,
        file_bytes=header.file_bytes,
        tensors=tensors,
        config=config,
        refusal=refusal,
        harmless=frozenset({_ROPE_FACTORS}),
        row_maps=row_maps,
    )


def config_from_gguf(header: GGUFHeader) -> ModelConfig:
    """The model's shape from the metadata, and from which tensors there are.

    A file without ``output.weight`` has a tied head; one with a query or gate bias has
    biases in attention or MLP. Raises :class:`UnsupportedModelError` naming the key that
    asks for something not built, and :class:`CheckpointError` for a missing or odd value.
    """
    fields = _Fields(header)
    fields.check_supported()
    names = {info.name for info in header.tensors}
    hidden, heads = fields.count("embedding_length"), fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", default=max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        fields.check_equal(key, head_dim)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    try:
        return ModelConfig(
            vocab_size=fields.count(
                "vocab_size", default=len(tokens) if isinstance(tokens, list) else None
            ),
            hidden_size=hidden,
            intermediate_size=fields.count("feed_forward_length"),
            num_layers=fields.count("block_count"),
            num_heads=heads,
            num_kv_heads=fields.count("attention.head_count_kv", default=heads),
            head_dim=head_dim,
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.number("rope.freq_base", default=10_000.0),
            max_position_embeddings=fields.count("context_length"),
            tie_word_embeddings="output.weight" not in names,
            attention_bias="blk.0.attn_q.bias" in names,
            mlp_bias="blk.0.ffn_gate.bias" in names,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{header.path}: {error}") from None


def rotary_row_map(num_heads: int, head_dim: int) -> np.ndarray:
    """i64[num_heads * head_dim]: row in Hugging Face's order of each row in the file.

    With ``head_dim`` 8, rows 0 to 7 of a head go to 0, 4, 1, 5, 2, 6, 3, 7: the file
    alternates between the first and the second half of the head.
    """
    halves = np.arange(head_dim).reshape(2, head_dim // 2)
    within_head = halves.T.reshape(-1)
    return (np.arange(num_heads)[:, None] * head_dim + within_head).reshape(-1)


class _Fields:
    """The metadata below the architecture's name, with the errors that go with it."""

    def __init__(self, header: GGUFHeader) -> None:
        self._path = header.path
        self._metadata: Mapping[str, Any] = header.metadata

    def check_supported(self) -> None:
        architecture = self._metadata.get("general.architecture")
        if architecture != "llama":
            raise UnsupportedModelError(
                f"{self._path}: general.architecture={architecture!r} is not supported, "
                "only 'llama' is."
            )
        kind = self._metadata.get("general.type", "model")
        if kind != "model":
            raise UnsupportedModelError(
                f"{self._path}: general.type={kind!r} is not supported, only whole models are."
            )
        if self._metadata.get("split.count", 1) != 1:
            raise UnsupportedModelError(
                f"{self._path}: split.count={self._metadata['split.count']}: a GGUF in several "
                "files is not supported; join them with llama.cpp's `llama-gguf-split --merge`."
            )
        for key, neutral in _NEUTRAL.items():
            value = self._metadata.get(f"llama.{key}", neutral[0])
            if value not in neutral:
                raise UnsupportedModelError(
                    f"{self._path}: llama.{key}={value!r} is not supported, "
                    f"only {neutral[-1]!r} is."
                )

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise CheckpointError(
                f"{self._path}: llama.{key}={value!r}: must be a positive integer, the same "
                "in all layers."
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, float) or not 0 < value < float("inf"):
            raise CheckpointError(f"{self._path}: llama.{key}={value!r}: must be positive.")
        # Stored in f32: take the decimal that was meant, 1e-05 and not 9.99999974e-06.
        return float(str(np.float32(value)))

    def check_equal(self, key: str, expected: int) -> None:
        value = self.count(key, default=expected)
        if value != expected:
            raise UnsupportedModelError(
                f"{self._path}: llama.{key}={value} is not supported where the head size is "
                f"{expected}: they must be equal."
            )

    def _get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(f"llama.{key}", default)
        if value is None:
            raise CheckpointError(f"{self._path}: metadata key 'llama.{key}' is missing.")
        return value


def _row_maps(config: ModelConfig) -> dict[str, Callable[[], np.ndarray]]:
    queries = functools.partial(rotary_row_map, config.num_heads, config.head_dim)
    keys = functools.partial(rotary_row_map, config.num_kv_heads, config.head_dim)
    return {
        "layers.q.weight": queries,
        "layers.q.bias": queries,
        "layers.k.weight": keys,
        "layers.k.bias": keys,
    }


def _stored_tensor(info: GGUFTensorInfo, header: GGUFHeader) -> StoredTensor:
    gguf = _import_gguf()
    try:
        kind = gguf.GGMLQuantizationType(info.type_id)
    except ValueError:
        raise CheckpointError(
            f"{header.path}: tensor {info.name!r} has the unknown type {info.type_id}; "
            "a newer gguf package may know it: pip install -U gguf"
        ) from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    *outer, inner = info.shape
    if inner % block:
        raise CheckpointError(
            f"{header.path}: tensor {info.name!r} has rows of {inner} values, which is not a "
            f"multiple of the {block} in a {kind.name} block."
        )
    nbytes = math.prod(outer) * (inner // block) * block_bytes
    return StoredTensor(
        name=info.name,
        shape=info.shape,
        type_name=kind.name,
        path=header.path,
        offset=info.offset,
        nbytes=nbytes,
        decode=_decoder(kind, block_bytes),
    )


@functools.cache
def _decoder(kind: Any, block_bytes: int) -> Callable[[np.ndarray], np.ndarray] | None:
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return None
    return lambda raw: dequantize(raw, kind)


def _check_extents(header: GGUFHeader, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse a file that ends before its tensors do, or in which two tensors overlap."""
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < end:
            raise CheckpointError(
                f"{header.path}: tensors {before!r} and {tensor.name!r} overlap in the file."
            )
        end, before = tensor.offset + tensor.nbytes, tensor.name
        if end > header.file_bytes:
            raise CheckpointError(
                f"{header.path}: truncated: tensor {tensor.name!r} ends at byte {end}, the file "
                f"at {header.file_bytes}; fetch it again."
            )


def _check_rope_factors(tensor: StoredTensor | None) -> None:
    """Frequency factors other than 1 are Llama 3.1's rope scaling in another form."""
    if tensor is None:
        return
    rows = tensor.read_rows(0, tensor.matrix_shape[0])
    if not np.all(rows == 1):
        raise UnsupportedModelError(
            f"{tensor.path}: tensor {_ROPE_FACTORS!r} scales the rotary frequencies, which is "
            "not supported (a model without rope scaling is)."
        )


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError("Reading a GGUF file needs gguf: pip install gguf") from error
    return gguf
