"""BatchDescriptor: everything one step of the model needs, as arrays of fixed shape.

The shapes are those of a :class:`~oxidize_jax.batch.buckets.Bucket`; two steps with
the same bucket run the same compiled program, whatever requests they serve.
"""

from __future__ import annotations

import jax

from oxidize_jax.types import state


@state
class BatchDescriptor:
    """One mixed step: decode tokens first, then prefill chunks, packed without gaps.

    With 2 decoding rows, one prefill chunk of 5 tokens, T = 10, Q = 4::

        token      0    1    2   3   4   5   6   7   8   9
        row        r0   r1   r2  r2  r2  r2  r2  S   S   S     (S = padding)
        tile                 [2   3   4   5] [6  T   T   T]    (T = padding)

    The first ``len(decode_rows)`` tokens are the decode part: token ``t`` of it belongs
    to row ``decode_rows[t]`` (``S`` where there is none; then the token is padding or
    belongs to a prefill tile). A tile is up to Q consecutive tokens of *one* sequence,
    so its KV is gathered once and not once per token. In a step without tiles (P = 0) every
    token is a decode token, also where several are of one row.
    """

    token_ids: jax.Array
    """i32[T]; 0 at padding."""
    positions: jax.Array
    """i32[T]: position in its sequence; 0 at padding."""
    token_rows: jax.Array
    """i32[T]: row of each token, ``S`` at padding."""
    slot_mapping: jax.Array
    """i32[T]: ``block * K + offset`` where the token's KV goes, ``B * K`` at padding."""
    block_tables: jax.Array
    """i32[S, M]: block ids of each row, ``B`` where unused."""
    kv_lens: jax.Array
    """i32[S]: tokens of the row whose KV exists once this step has written; 0 if idle."""
    decode_rows: jax.Array
    """i32[Dn], Dn <= T: row of decode token t, ``S`` at padding."""
    tile_rows: jax.Array
    """i32[P]: row of each prefill tile, ``S`` at padding. P may be 0."""
    tile_tokens: jax.Array
    """i32[P, Q]: token indices of the tile, ``T`` at padding."""
    sample_rows: jax.Array
    """i32[C]: rows that sample this step, ``S`` at padding."""
    logits_indices: jax.Array
    """i32[C]: token index whose hidden state gives the row's logits, ``T`` at padding."""
    copy_src: jax.Array
    """i32[S]: blocks to copy before anything is written (copy-on-write), ``B`` at padding."""
    copy_dst: jax.Array
    """i32[S]: where they go, ``B`` at padding."""
    num_copies: jax.Array
    """i32[]: entries of ``copy_src``/``copy_dst`` in use, packed at the front."""
