"""Tiny models of awkward shapes, and descriptors built by hand in plain numpy."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from oxidize_jax.batch.descriptor import BatchDescriptor
from oxidize_jax.model.config import ModelConfig
from oxidize_jax.model.transformer import parameter_shapes

CONFIGS = {
    "gqa_tied": ModelConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=1000.0,
        tie_word_embeddings=True,
    ),
    "mha_untied_biased": ModelConfig(
        vocab_size=37,
        hidden_size=20,
        intermediate_size=28,
        num_layers=2,
        num_heads=3,
        num_kv_heads=3,
        head_dim=10,
        attention_bias=True,
        mlp_bias=True,
    ),
    "one_kv_head": ModelConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=1,
        head_dim=6,
        rms_norm_eps=1e-3,
    ),
}


def random_params(config: ModelConfig, seed: int = 0, dtype=jnp.float32) -> dict:
    """Weights large enough that every part of the model moves the logits."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in parameter_shapes(config).items():
        value = rng.normal(size=shape)
        if name.endswith("norm.weight"):
            params[name] = jnp.asarray(1 + 0.3 * value, jnp.float32)
        else:
            params[name] = jnp.asarray(value * 1.5 / np.sqrt(shape[-1]), dtype)
    return params


@dataclasses.dataclass(frozen=True)
class Piece:
    """``tokens`` of the row's sequence, from position ``start`` on."""

    row: int
    table: Sequence[int]
    start: int
    tokens: Sequence[int]
    decode: bool = False
    """Goes through the decode part (one token only)."""


def make_batch(
    pieces: Sequence[Piece],
    *,
    num_blocks: int,
    block_size: int,
    seqs: int = 4,
    width: int = 7,
    tile: int = 4,
    tokens: int = 0,
    decodes: int = 0,
    tiles: int = 0,
    copies: Sequence[tuple[int, int]] = (),
) -> BatchDescriptor:
    """A step of ``pieces``, decodes first, with logits for every token.

    Padded to ``tokens`` tokens, ``decodes`` decode rows and ``tiles`` tiles.
    """
    pieces = sorted(pieces, key=lambda piece: not piece.decode)
    total = max(tokens, sum(len(piece.tokens) for piece in pieces))
    no_slot = num_blocks * block_size
    ids, positions = np.zeros(total, np.int32), np.zeros(total, np.int32)
    rows, slots = np.full(total, seqs, np.int32), np.full(total, no_slot, np.int32)
    tables = np.full((seqs, width), num_blocks, np.int32)
    lens = np.zeros(seqs, np.int32)
    decode_rows, tile_rows, tile_tokens = [], [], []
    at = 0
    for piece in pieces:
        tables[piece.row, : len(piece.table)] = piece.table
        lens[piece.row] = piece.start + len(piece.tokens)
        indices = range(at, at + len(piece.tokens))
        for offset, token in enumerate(piece.tokens):
            position = piece.start + offset
            ids[at], positions[at], rows[at] = token, position, piece.row
            slots[at] = piece.table[position // block_size] * block_size + position % block_size
            at += 1
        if piece.decode:
            assert len(piece.tokens) == 1
            decode_rows.append(piece.row)
            continue
        for first in range(0, len(indices), tile):
            part = list(indices[first : first + tile])
            tile_rows.append(piece.row)
            tile_tokens.append(part + [total] * (tile - len(part)))
    decode_rows += [seqs] * (decodes - len(decode_rows))
    tile_rows += [seqs] * (tiles - len(tile_rows))
    tile_tokens += [[total] * tile] * (tiles - len(tile_tokens))
    logits = np.arange(total, dtype=np.int32)
    src, dst = np.full((2, seqs), num_blocks, np.int32)
    for i, (source, target) in enumerate(copies):
        src[i], dst[i] = source, target
    fields = {
        "token_ids": ids,
        "positions": positions,
        "token_rows": rows,
        "slot_mapping": slots,
        "block_tables": tables,
        "kv_lens": lens,
        "decode_rows": np.array(decode_rows, np.int32),
        "tile_rows": np.array(tile_rows, np.int32),
        "tile_tokens": np.array(tile_tokens, np.int32).reshape(-1, tile),
        "sample_rows": rows,
        "logits_indices": np.where(rows < seqs, logits, total).astype(np.int32),
        "copy_src": src,
        "copy_dst": dst,
        "num_copies": np.int32(len(copies)),
    }
    return BatchDescriptor(**{name: jnp.asarray(value) for name, value in fields.items()})


@pytest.fixture(params=CONFIGS)
def config(request) -> ModelConfig:
    return CONFIGS[request.param]


@pytest.fixture
def kit():
    """The helpers of this file, since test modules cannot import a conftest."""

    class Kit:
        configs = CONFIGS
        piece = Piece
        batch = staticmethod(make_batch)
        params = staticmethod(random_params)

    return Kit
