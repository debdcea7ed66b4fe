"""Who goes first, and whose cached blocks are shared."""

from __future__ import annotations

import json
import threading

import pytest
from serving import PATH, eventually

from oxidize_jax import SamplingParams

LONG = {"max_tokens": 40, "ignore_eos": True}


def test_a_smaller_priority_goes_before_those_in_line(llm, served, gate):
    """Eight wait for four rows when one comes that may go first, and one that must go last."""
    gate.clear()
    ends, lock = [], threading.Lock()

    def ask(name, priority):
        with served.http() as http:
            body = {"prompt": "ab", "n": 4, "priority": priority, "seed": 1, **LONG}
            assert http.post(PATH, json=body).status_code == 200
        with lock:
            ends.append(name)

    threads = []
    for i, (name, priority) in enumerate(
        [("first", 0), ("second", 0), ("late", 7), ("third", 0), ("urgent", -1)]
    ):
        threads.append(threading.Thread(target=ask, args=[name, priority]))
        threads[-1].start()
        eventually(lambda i=i: served.service.thread.num_reserved == 4 * (i + 1))
    gate.set()
    for thread in threads:
        thread.join(120)
    assert ends.index("urgent") < ends.index("second") < ends.index("third") < ends.index("late")


@pytest.mark.parametrize("value", [1.5, "1", 2**31, -(2**31) - 1, True])
def test_priorities_that_are_none(http, value):
    answer = http.post(PATH, json={"prompt": "a", "priority": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "priority"


@pytest.mark.parametrize("chat", [False, True])
def test_salts_keep_cached_blocks_apart(llm, http, chat):
    llm.reset_prefix_cache()
    text = "the same sixteen characters, and more"

    def ask(salt):
        body = {"max_tokens": 2, "temperature": 0, "cache_salt": salt}
        body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        path = "/v1/chat/completions" if chat else PATH
        if not chat and salt == "c":  # as token ids too
            body["prompt"] = llm.tokenizer.encode(text)
        got = http.post(path, json=body).json()
        return got["usage"]["prompt_tokens_details"]["cached_tokens"], got["choices"]

    first, want = ask("a")
    assert first == 0
    for salt in ("b", None, "c"):
        cached, choices = ask(salt)
        assert cached == 0
        assert choices == want
    for salt in ("a", "b", None, "c"):
        cached, choices = ask(salt)
        assert cached >= 16
        assert choices == want


@pytest.mark.parametrize("salt", ["", 5, "\ud800"])
def test_salts_that_are_none(http, salt):
    body = json.dumps({"prompt": "a", "cache_salt": salt}).encode()
    headers = {"Content-Type": "application/json"}
    answer = http.post(PATH, content=body, headers=headers)
    assert answer.status_code == 400


def test_priorities_of_generate(llm):
    params = SamplingParams(max_tokens=3, seed=1)
    prompts = ["ab", "cd", "ef"]
    want = llm.generate(prompts, params, use_tqdm=False)
    got = llm.generate(prompts, params, use_tqdm=False, priority=[2, -1, 0])
    assert [o.outputs[0].text for o in got] == [o.outputs[0].text for o in want]
    groups = llm.prepare(prompts, params, priority=[2, -1, 0])
    assert [group.request.priority for group in groups] == [2, -1, 0]
    for wrong in ([1], "abc", 1, [0, 0, 2**31], [0, 0, 0.5]):
        with pytest.raises(ValueError, match="priority"):
            llm.generate(prompts, params, priority=wrong)
