"""The oracle itself: against Hugging Face's logits, and by hand."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oxidize_jax.checkpoints import load_checkpoint
from oxidize_jax.model.functional import build
from oxidize_jax.model.reference import attention, reference_forward

GOLDENS = Path(__file__).parents[1] / "goldens" / "llama_tiny"


@pytest.fixture(params=["gqa_tied", "gqa_wide_heads", "mha_biased"])
def golden(request):
    checkpoint = load_checkpoint(GOLDENS / request.param)
    arrays = np.load(GOLDENS / request.param / "golden.npz")
    tokens = np.concatenate([arrays["prompt_ids"], arrays["output_ids"][:-1]]).astype(np.int32)
    return checkpoint, tokens, arrays["logits"]


def test_ld09_reference_gives_the_logits_of_hugging_face(golden):
    checkpoint, tokens, logits = golden
    run = jax.jit(reference_forward, static_argnums=0)
    ours = run(checkpoint.config, checkpoint.params, tokens)
    np.testing.assert_allclose(ours, logits, atol=1e-4)


def test_ld09_paged_forward_gives_the_logits_of_hugging_face(golden, kit):
    checkpoint, tokens, logits = golden
    decoder, leaves = build(checkpoint.config, checkpoint.params)
    sizes = {"num_blocks": 9, "block_size": 4}
    batch = kit.batch([kit.piece(3, [8, 1, 6, 2, 4], 0, tokens)], **sizes)
    ours, _ = jax.jit(decoder.forward)(leaves, decoder.init_kv(9, 4), batch)
    np.testing.assert_allclose(ours, logits, atol=1e-4)


def test_attention_of_two_tokens_by_hand():
    q = jnp.array([[[2.0, 0.0]], [[0.0, 2.0]]], jnp.float32)
    k = jnp.array([[[1.0, 0.0]], [[0.0, 1.0]]], jnp.float32)
    v = jnp.array([[[3.0, 0.0]], [[0.0, 5.0]]], jnp.float32)
    out = attention(q, k, v)
    np.testing.assert_allclose(out[0, 0], [3.0, 0.0])
    weight = 1 / (1 + np.exp(2 / np.sqrt(2)))
    np.testing.assert_allclose(out[1, 0], [3 * weight, 5 * (1 - weight)], rtol=1e-6)
