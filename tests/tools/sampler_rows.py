"""Rows for the sampler: by broadcast, or from what each of several requests wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oxidize_jax.sampling.edits import NO_TOKEN, Edits, Sequences
from oxidize_jax.sampling.keys import key_data_from_seed
from oxidize_jax.sampling.sampler import SamplingArrays
from oxidize_jax.sampling.token_mask import pack_token_mask

_EDITS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "sequence": (np.int32, 0, ()),
    "prompt_len": (np.int32, 0, ()),
    "num_tokens": (np.int32, 0, ()),
    "suppress_ids": (np.int32, NO_TOKEN, (2,)),
    "masked": (bool, False, ()),
    "listed": (bool, False, ()),
    "repetition_penalty": (np.float32, 1.0, ()),
    "presence_penalty": (np.float32, 0.0, ()),
    "frequency_penalty": (np.float32, 0.0, ()),
}
_ARRAYS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "temperature": (np.float32, 1.0, ()),
    "top_k": (np.int32, 0, ()),
    "top_p": (np.float32, 1.0, ()),
    "min_p": (np.float32, 0.0, ()),
    "typical_p": (np.float32, 1.0, ()),
    "token_index": (np.int32, 0, ()),
    "num_logprobs": (np.int32, -1, ()),
}


def arrays(rows: int, **fields: Any) -> SamplingArrays:
    """Rows with seeds 0, 1, ... and temperature 1, but for ``fields`` (broadcast)."""
    keys = fields.pop("key", None)
    if keys is None:
        keys = np.stack([key_data_from_seed(i) for i in range(rows)])

    def build(defaults: Mapping[str, tuple[Any, Any, tuple[int, ...]]]) -> dict[str, Any]:
        built = {}
        for name, (dtype, default, extra) in defaults.items():
            value = np.asarray(fields.pop(name, default), dtype)
            built[name] = jnp.asarray(np.broadcast_to(value, (rows, *extra)))
        return built

    edits = Edits(**build(_EDITS))
    params = SamplingArrays(
        edits=edits,
        key=jnp.asarray(np.broadcast_to(np.asarray(keys, np.uint32), (rows, 2))),
        **build(_ARRAYS),
    )
    assert not fields, fields
    return params


def no_sequences(
    *, tokens: int = 1, biases: int = 0, words: int = 0, mask_words: int = 0
) -> Sequences:
    """One request without any token, and with room for nothing unless given."""
    return Sequences(
        tokens=jnp.zeros((1, tokens), jnp.int32),
        bias_ids=jnp.full((1, biases), NO_TOKEN, jnp.int32),
        bias_values=jnp.zeros((1, biases), jnp.float32),
        bad_words=jnp.full((1, words, 4), NO_TOKEN, jnp.int32),
        token_mask=jnp.zeros((1, mask_words), jnp.uint32),
    )


def from_requests(
    requests: Sequence[Mapping[str, Any]],
    vocab: int,
    *,
    length: int = 32,
    biases: int = 8,
    words: int = 4,
    word_length: int = 4,
) -> tuple[SamplingArrays, Sequences]:
    """One row for each request: a dict of options as :mod:`reference_sampler` takes them.

    The row of request i stands at place ``R - 1 - i`` of the sequences, and what stands behind
    its tokens is garbage: nothing may take one row for another, or read too far.
    """
    r = len(requests)
    sequences = {
        "tokens": np.full((r, length), 1, np.int32),
        "bias_ids": np.full((r, biases), NO_TOKEN, np.int32),
        "bias_values": np.zeros((r, biases), np.float32),
        "bad_words": np.full((r, words, word_length), NO_TOKEN, np.int32),
        "token_mask": np.zeros((r, -(-vocab // 32)), np.uint32),
    }
    fields: dict[str, list[Any]] = {}
    for i, request in enumerate(requests):
        place, options = r - 1 - i, dict(request)
        prompt, output = options.pop("prompt", []), options.pop("output", [])
        history = [*prompt, *output]
        sequences["tokens"][place, : len(history)] = history
        bias = options.pop("logit_bias", {})
        sequences["bias_ids"][place, : len(bias)] = list(bias)
        sequences["bias_values"][place, : len(bias)] = list(bias.values())
        bad_words = options.pop("bad_words", [])
        for j, word in enumerate(bad_words):
            sequences["bad_words"][place, j, : len(word)] = word[::-1]
        allowed, banned = options.pop("allowed", None), options.pop("banned", [])
        sequences["token_mask"][place] = pack_token_mask(vocab, allowed, banned)
        suppress = options.pop("suppress", [])
        row = {
            "sequence": place,
            "prompt_len": len(prompt),
            "num_tokens": len(history),
            "token_index": len(output),
            "suppress_ids": [*suppress, *[NO_TOKEN] * (2 - len(suppress))],
            "masked": allowed is not None or bool(banned),
            "listed": bool(bias or bad_words),
            **options,
        }
        for name, (_, default, _) in (_EDITS | _ARRAYS).items():
            fields.setdefault(name, []).append(row.pop(name, default))
        fields.setdefault("key", []).append(key_data_from_seed(row.pop("seed", i)))
        assert not row, row
    return arrays(r, **fields), Sequences(**jax.tree.map(jnp.asarray, sequences))
