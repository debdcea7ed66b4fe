"""Every family against transformers: prefill, chunked prefill and paged decode, and the oracle."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import quick_jit
from family_goldens import FOLDER, read_golden, write_golden_folder

from oxidize_jax.checkpoints import load_checkpoint
from oxidize_jax.engine.generate import GenerateConfig, generate
from oxidize_jax.engine.inputs import Sampling, pad_prompts
from oxidize_jax.model import attention
from oxidize_jax.model.config import RopeScaling
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
reference = quick_jit(reference_forward, static_argnums=0)


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
def config(loaded):
    """As an engine has it whose sequences have up to 64 tokens."""
    return loaded.config.for_sequences(64)


@pytest.fixture(scope="module")
def paged(config, loaded):
    return build(config, loaded.params)


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


def test_ld09_the_reference_gives_the_logits_of_transformers(golden, config, loaded):
    logits = reference(config, loaded.params, golden.token_ids)
    np.testing.assert_allclose(logits, golden.logits, **TOLERANCE)


FEATURES = {
    "llama_rope_llama3": [{"rope_scaling": RopeScaling()}],
    "llama_rope_linear": [{"rope_scaling": RopeScaling()}],
    "llama_rope_yarn": [{"rope_scaling": RopeScaling()}],
    "mistral": [{"layer_windows": ()}, {"layer_windows": (7, 8)}],
    "qwen2": [{"layer_windows": (9, 9)}, {"layer_windows": (9, 0)}],
    "smollm3": [{"layer_ropes": ()}],
    "phi3_longrope_short": [{"longest_sequence": 65}],
    "phi3_longrope_long": [{"longest_sequence": 16}],
    "phi3_partial": [{"rotary_dim": 8}, {"layer_windows": ()}],
    "gemma2": [
        {"attention_softcap": 0.0},
        {"final_softcap": 0.0},
        {"attention_scale": None},
        {"embedding_scale": 1.0},
        {"layer_windows": (9, 9)},
        {"activation": "gelu"},
    ],
    "gemma3": [
        {"layer_ropes": ()},
        {"local_rope_theta": 1000.0},
        {"rope_scaling": RopeScaling()},
        {"layer_windows": ()},
    ],
    "mixtral": [{"norm_topk_prob": False}, {"num_experts_per_token": 3}],
    "mixtral_window": [{"layer_windows": ()}],
    "qwen3_moe": [{"norm_topk_prob": False}, {"num_experts_per_token": 2}],
    "qwen3_moe_unnormed": [{"norm_topk_prob": True}],
    "gpt2": [{"activation": "gelu"}],
}
"""What of a configuration no shape of a parameter gives away."""


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_moves_the_logits_by_more_than_the_tolerance(name, tmp_path):
    golden = read_golden(name)
    loaded = load_checkpoint(write_golden_folder(tmp_path, golden))
    config = loaded.config.for_sequences(64)
    for changes in FEATURES[name]:
        other = dataclasses.replace(config, **changes)
        logits = reference(other, loaded.params, golden.token_ids)
        assert np.abs(logits - golden.logits).max() > 5e-4, changes


@pytest.mark.parametrize("longest", [16, 64])
def test_ld05_a_sequence_that_grows_past_the_limit_keeps_its_factors(longest, tmp_path, kit):
    """Of 16 tokens and fewer transformers takes the short factors, and so does an engine for
    no longer ones; one for longer ones takes the long factors from the first token on."""
    golden = read_golden("phi3_longrope_long")
    loaded = load_checkpoint(write_golden_folder(tmp_path, golden))
    assert loaded.config.rope_scaling.original_max_position_embeddings == 16
    model = Paged(kit, *build(loaded.config.for_sequences(longest), loaded.params))
    end = min(18, longest)
    logits, kv = model.step(model.kv(), 0, golden.token_ids[:14])
    rows = [logits]
    for position in range(14, end):
        logits, kv = model.step(kv, position, golden.token_ids[position : position + 1])
        rows.append(logits)
    short, long = (
        np.asarray(reference(loaded.config.for_sequences(n), loaded.params, golden.token_ids))
        for n in (16, 17)
    )
    wanted, other = (short, long) if longest == 16 else (long, short)
    np.testing.assert_allclose(np.concatenate(rows), wanted[:end], **TOLERANCE)
    assert np.abs(wanted[:end] - other[:end]).max() > 1e-2
    if longest > 16:
        # What transformers gives for the whole sequence, its first tokens among them.
        np.testing.assert_allclose(np.concatenate(rows), golden.logits[:end], **TOLERANCE)


# The other families differ from these in nothing that depends on the type of the weights.
LADDER = ["gemma2", "gpt2", "mixtral"]
SLOW_LADDER = ["olmo2", "phi3_partial", "gemma3", "qwen3", "smollm3", "qwen3_moe"]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    "name", LADDER + [pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LADDER]
)
def test_every_type_of_weights_gives_about_the_same_logits(name, dtype, tmp_path, kit):
    golden = read_golden(name)
    loaded = load_checkpoint(write_golden_folder(tmp_path, golden), dtype)
    model = Paged(kit, *build(loaded.config, loaded.params, kv_dtype="bfloat16"))
    split = len(golden.prompt_ids)
    logits, kv = model.step(model.kv(), 0, golden.prompt_ids)
    rows = [logits]
    for position in range(split, split + 4):
        logits, kv = model.step(kv, position, golden.token_ids[position : position + 1])
        rows.append(logits)
    wanted = golden.logits[: split + 4]
    error = np.linalg.norm(np.concatenate(rows) - wanted) / np.linalg.norm(wanted)
    assert 1e-5 < error < {"bfloat16": 0.02, "int8": 0.08}[dtype]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_only_blocks_in_the_window_are_read(platform, tmp_path, kit, monkeypatch):
    """What lies before every window is made NaN: read, it would be in the sums of a CPU.

    Only not the first block, which is read in the place of blocks that are not written yet. An
    accelerator masks what it reads, so there the results alone are compared.
    """
    monkeypatch.setattr(attention, "_plan", lambda *_: attention.Plan(rows=1, chunk=1))
    golden = read_golden("mistral")
    loaded = load_checkpoint(write_golden_folder(tmp_path, golden))
    assert loaded.config.layer_windows == (7, 7)
    decoder, leaves = build(loaded.config, loaded.params, platform=platform)
    step = quick_jit(decoder.forward)  # traced anew, with the smaller chunk
    rows, kv, start = [], decoder.init_kv(B, K), 0
    for end in (24, 40, 41, 52):
        # A split of a CPU's decodes is two blocks: 41 - 7 = 34 is in that of 32.
        for block in range(1, max(0, start - 7) // 8 * 2):
            for layer in range(loaded.config.num_layers):
                kv = kv.at[layer * B + TABLE[block]].set(np.nan)
        one = end - start == 1
        piece = kit.piece(2, TABLE, start, golden.token_ids[start:end], decode=one)
        logits, kv = step(leaves, kv, kit.batch([piece], **(DECODES if one else MIXED)))
        rows.append(np.asarray(logits)[: end - start])
        start = end
    np.testing.assert_allclose(np.concatenate(rows), golden.logits, **TOLERANCE)


def test_windows_of_alternate_layers_on_an_accelerator(tmp_path, kit):
    golden = read_golden("gemma2")
    loaded = load_checkpoint(write_golden_folder(tmp_path, golden))
    assert loaded.config.layer_windows == (9, 0)
    model = Paged(kit, *build(loaded.config, loaded.params, platform="gpu"))
    logits, kv = model.step(model.kv(), 0, golden.prompt_ids)
    rows = [logits]
    for position in range(len(golden.prompt_ids), 28):
        logits, kv = model.step(kv, position, golden.token_ids[position : position + 1])
        rows.append(logits)
    np.testing.assert_allclose(np.concatenate(rows), golden.logits[:28], **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gpt2", "smollm3", "qwen3_moe"])
def test_the_engine_generates_these_tokens_under_preemption(name, tmp_path):
    golden = read_golden(name)
    loaded = load_checkpoint(write_golden_folder(tmp_path, golden))
    decoder, leaves = build(loaded.config, loaded.params)
    # Two sequences of 53 tokens need 28 blocks.
    sizes = {"num_blocks": 20, "block_size": K, "max_num_seqs": 3, "prefill_tile": 4}
    config = GenerateConfig(
        decoder, len(golden.output_ids), max_num_batched_tokens=16, max_model_len=53, **sizes
    )
    prompts = [golden.prompt_ids.tolist(), golden.prompt_ids[:4].tolist(), [1, 2, 3]]
    out = generate(
        leaves,
        pad_prompts(prompts, vocab_size=decoder.vocab_size),
        Sampling(jax.random.key(0), 0),
        config,
    )
    assert np.array_equal(out.tokens[0, 0], golden.output_ids)
