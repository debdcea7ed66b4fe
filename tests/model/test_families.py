"""Every family against transformers: prefill, chunked prefill and paged decode, and the oracle."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import quick_jit
from family_goldens import FOLDER, read_golden, write_golden_folder

from oxidize_jax.checkpoints import load_checkpoint
from oxidize_jax.model.functional import build
from oxidize_jax.model.reference import reference_forward

MODELS = sorted(path.stem for path in FOLDER.glob("*.npz"))
B, K = 19, 4
TABLE = np.random.default_rng(0).permutation(B)[:14]
"""Blocks of a sequence of up to 56 tokens."""
MIXED = {"num_blocks": B, "block_size": K, "width": 14, "tokens": 24, "decodes": 2, "tiles": 7}
DECODES = {"num_blocks": B, "block_size": K, "width": 14, "tokens": 2, "decodes": 2}
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}

run = quick_jit(
    lambda decoder, leaves, kv, batch: decoder.forward(leaves, kv, batch), static_argnums=0
)


@dataclasses.dataclass(frozen=True)
class Paged:
    """A model and one sequence in its cache."""

    kit: object
    decoder: object
    leaves: dict

    def step(self, kv, start, tokens):
        """Logits of ``tokens``, at positions from ``start`` on; of one token it is a decode."""
        one = len(tokens) == 1
        piece = self.kit.piece(2, TABLE, start, tokens, decode=one)
        batch = self.kit.batch([piece], **(DECODES if one else MIXED))
        logits, kv = run(self.decoder, self.leaves, kv, batch)
        return np.asarray(logits)[: len(tokens)], kv

    def kv(self):
        # Nothing may be read that was not written.
        return jnp.full_like(self.decoder.init_kv(B, K), self._garbage())

    def _garbage(self):
        return np.nan if self.decoder.kv_dtype == "float32" else 0


@pytest.fixture(scope="module", params=MODELS)
def golden(request):
    return read_golden(request.param)


@pytest.fixture(scope="module")
def loaded(golden, tmp_path_factory):
    return load_checkpoint(write_golden_folder(tmp_path_factory.mktemp(golden.name), golden))


@pytest.fixture(scope="module")
def paged(loaded):
    return build(loaded.config, loaded.params)


def test_ld09_greedy_tokens_and_logits_are_those_of_transformers(golden, paged, kit):
    model = Paged(kit, *paged)
    prompt = len(golden.prompt_ids)
    logits, kv = model.step(model.kv(), 0, golden.prompt_ids)
    rows, tokens = [logits], [logits[-1].argmax()]
    for position in range(prompt, len(golden.token_ids)):
        logits, kv = model.step(kv, position, tokens[-1:])
        rows.append(logits)
        tokens.append(logits[-1].argmax())
    assert np.array_equal(tokens, golden.output_ids)
    np.testing.assert_allclose(np.concatenate(rows), golden.logits, **TOLERANCE)


def test_sc09_a_prompt_in_chunks_gives_the_same_logits(golden, paged, kit):
    model, rows, start = Paged(kit, *paged), [], 0
    kv = model.kv()
    for end in (5, 6, 8, 17, 36, 37, 52):
        logits, kv = model.step(kv, start, golden.token_ids[start:end])
        rows.append(logits)
        start = end
    assert start == len(golden.token_ids)
    np.testing.assert_allclose(np.concatenate(rows), golden.logits, **TOLERANCE)


def test_ld09_the_reference_gives_the_logits_of_transformers(golden, loaded):
    logits = quick_jit(reference_forward, static_argnums=0)(
        loaded.config, loaded.params, golden.token_ids
    )
    np.testing.assert_allclose(logits, golden.logits, **TOLERANCE)
