"""The real model finds a text as likely as transformers does."""

import json
from pathlib import Path

import numpy as np
import pytest

from oxidize_jax import LLM, SamplingParams

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "smollm2_score.json").read_text())
IDS = GOLDEN["token_ids"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm(smollm2_path):
    return LLM(
        smollm2_path,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=2,
        max_num_batched_tokens=128,  # the text takes three steps
        warm_up=False,
        progress=False,
    )


def test_logprobs_ranks_and_alternatives(llm):
    scores, _ = llm.score([GOLDEN["text"], "Alice was tired."], top_logprobs=3)
    assert scores.prompt_token_ids == tuple(IDS)
    np.testing.assert_allclose(scores.token_logprobs[1:], GOLDEN["logprobs"], atol=2e-3)
    # Ranks far down are of tokens whose logits differ by less than rounding.
    ranks, expected = np.array(scores.token_ranks[1:]), np.array(GOLDEN["ranks"])
    assert (ranks == expected)[expected < 100].mean() > 0.99
    np.testing.assert_allclose(ranks, expected, rtol=0.02, atol=1)
    for entry, best in zip(scores.prompt_logprobs[1::10], GOLDEN["top"], strict=True):
        for token, logprob in best:
            assert entry[token].logprob == pytest.approx(logprob, abs=2e-3)
    assert scores.perplexity == pytest.approx(GOLDEN["perplexity"], rel=1e-4)


def test_perplexity_in_one_window_and_in_several(llm):
    result = llm.perplexity(GOLDEN["text"])
    assert (result.num_windows, result.num_tokens) == (1, len(IDS) - 1)
    assert result.perplexity == pytest.approx(GOLDEN["perplexity"], rel=1e-4)
    result = llm.perplexity(GOLDEN["text"], window=128, stride=64)
    assert result.num_tokens == GOLDEN["windows"]["tokens"] == len(IDS) - 1
    assert result.perplexity == pytest.approx(GOLDEN["windows"]["perplexity"], rel=1e-4)


def test_embedding(llm):
    (mean,) = llm.embed(GOLDEN["text"], normalize=False)
    expected = np.array(GOLDEN["embedding"])
    assert mean @ expected / np.linalg.norm(mean) / np.linalg.norm(expected) > 1 - 1e-5
    np.testing.assert_allclose(mean, expected, atol=2e-3 * np.abs(expected).max())


def test_greedy_decoding_writes_the_continuation_that_scores_as_greedy(llm):
    prompt = IDS[:40]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, prompt_logprobs=1)
    (output,) = llm.generate(prompt, params)
    completion = output.outputs[0]
    np.testing.assert_allclose(
        [entry[i].logprob for entry, i in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)],
        GOLDEN["logprobs"][:39],
        atol=2e-3,
    )
    (scored,) = llm.loglikelihood([(prompt, list(completion.token_ids))])
    assert scored.is_greedy
    assert scored.logprob == pytest.approx(completion.cumulative_logprob, abs=1e-3)
