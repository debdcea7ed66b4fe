"""``echo``: prompts with their log probabilities, as evaluation harnesses ask for them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from serving import eventually, serving

PATH = "/v1/completions"
LM_EVAL = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1}


def scores(llm, prompt, top=1):
    (score,) = llm.score([prompt], top_logprobs=top, use_tqdm=False)
    return score


def check_logprobs(llm, reported, prompt, count):
    """Those of the prompt are LLM.score's."""
    want = scores(llm, prompt)
    ids = want.prompt_token_ids
    assert len(reported["tokens"]) == count
    assert reported["token_logprobs"][0] is None
    assert reported["top_logprobs"][0] is None
    np.testing.assert_allclose(
        reported["token_logprobs"][1 : len(ids)], want.token_logprobs[1:], rtol=1e-5
    )
    for i in range(1, len(ids)):
        best = max(reported["top_logprobs"][i].items(), key=lambda item: item[1])
        assert (best[0] == reported["tokens"][i]) == (want.token_ranks[i] == 1)
    lengths = [len(token) for token in reported["tokens"]]
    assert reported["text_offset"] == np.cumsum([0, *lengths])[:-1].tolist()


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("new", [0, 1, 4])
def test_echo_gives_the_prompt_with_its_logprobs(llm, http, ids, new):
    prompts = ["abcdef", "xy"]
    asked = [llm.tokenizer.encode(p) for p in prompts] if ids else prompts
    body = {**LM_EVAL, "prompt": asked, "max_tokens": new, "ignore_eos": True}
    got = http.post(PATH, json=body).json()
    plain = {**body, "echo": False, "max_tokens": max(1, new)}
    without = http.post(PATH, json=plain).json()["choices"]
    for choice, prompt, other in zip(got["choices"], prompts, without, strict=True):
        assert choice["text"] == prompt + (other["text"] if new else "")
        assert choice["finish_reason"] == "length"
        check_logprobs(llm, choice["logprobs"], prompt, len(prompt) + new)
    usage = got["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (8, 2 * new)


@pytest.mark.parametrize("new", [0, 5])
def test_echo_in_a_stream(llm, served, http, new):
    body = {**LM_EVAL, "prompt": "abc", "max_tokens": new, "n": 2, "ignore_eos": True}
    whole = http.post(PATH, json=body).json()["choices"]
    texts, logprobs = ["", ""], [[], []]
    with http.stream("POST", PATH, json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                texts[choice["index"]] += choice["text"]
                logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
    assert texts == [choice["text"] for choice in whole]
    assert logprobs == [choice["logprobs"]["token_logprobs"] for choice in whole]


def test_echo_without_logprobs(http):
    body = {"prompt": "abc", "echo": True, "max_tokens": 0}
    (choice,) = http.post(PATH, json=body).json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("abc", None)


def test_what_echo_cannot_do_is_refused(llm, http):
    for more in ({"logprobs": 4}, {"prompt": "a" * 64}, {"max_tokens": -1}, {"prompt": ""}):
        assert http.post(PATH, json={**LM_EVAL, "prompt": "ab", **more}).status_code == 400
    assert http.post(PATH, json={"prompt": "ab", "max_tokens": 0}).status_code == 400
    chat = {"messages": [{"role": "user", "content": "a"}], "echo": True}
    assert http.post("/v1/chat/completions", json=chat).status_code == 400


def test_scores_that_wait_are_bounded(llm, monkeypatch):
    with serving(llm, max_queue=0) as served, served.http() as http:
        monkeypatch.setattr(served.service, "_num_scoring", 1)
        refused = http.post(PATH, json={**LM_EVAL, "prompt": "ab"})
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        monkeypatch.setattr(served.service, "_num_scoring", 0)
        eventually(served.is_idle)
        assert http.post(PATH, json={**LM_EVAL, "prompt": "ab"}).status_code == 200
