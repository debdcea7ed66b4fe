"""The page at / and what it shows: GET /engine."""

from __future__ import annotations

import re
import threading
import time

from serving import check_clean, eventually, serving

from oxidize_jax.engine import observe
from oxidize_jax.serve import watch

PATH = "/v1/completions"
LONG = {"prompt": "abcdefgh", "max_tokens": 50, "ignore_eos": True, "seed": 1}


def test_the_page_is_one_file_that_loads_nothing(http):
    response = http.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "connect-src 'self'" in policy
    html = response.text
    assert len(re.findall(r"<script\b", html)) == len(re.findall("'sha256-", policy)) - 1 == 1
    # Neither what the policy would stop, nor HTML that is made of what a model writes.
    assert not re.search(r"""\bon[a-z]+=["']|\bstyle=["']|innerHTML|insertAdjacent|eval\(""", html)
    assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\((?!data:)""", html)


def test_an_idle_engine(http, llm):
    got = http.get("/engine").json()
    config = llm.config
    assert got["model"] == "tiny"
    assert got["config"]["num_blocks"] == config.num_blocks
    assert (got["requests"], got["num_queued"]) == ([], 0)
    blocks = got["blocks"]
    assert blocks["used"] == 0
    assert blocks["cached"] + blocks["free"] == len(blocks["map"]) == config.num_blocks
    assert set(blocks["map"]) <= {"c", "."}
    assert got["age_s"] < 5
    again = http.get("/engine").json()
    assert again["time"] >= got["time"]


def test_requests_that_run_and_wait(llm, served, http, monkeypatch):
    """Four rows of eight sequences, which share the blocks of their prompt."""
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda n: time.sleep(0.02) or step(n))

    def ask():
        with served.http() as other:
            assert other.post(PATH, json={**LONG, "n": 8}).status_code == 200

    asking = threading.Thread(target=ask)
    asking.start()
    pictures = []
    while asking.is_alive():
        pictures.append(http.get("/engine").json())
    asking.join()
    full = [p for p in pictures if sum(r["row"] is not None for r in p["requests"]) == 4]
    assert full
    for picture in full:
        held = [block for r in picture["requests"] for block in r["blocks"]]
        marks = picture["blocks"]["map"]
        assert {block for block, mark in enumerate(marks) if mark.isdigit()} == set(held)
        assert all(int(marks[block]) == held.count(block) for block in held)
        assert picture["blocks"]["used"] == len(set(held))
        for one in picture["requests"]:
            assert one["prompt_tokens"] == 8 <= one["tokens"] <= one["max_tokens"] == 58
            assert one["state"] in ("waiting", "prefill", "decode", "preempted", "ending")
            if one["row"] is None:
                assert one["state"] in ("waiting", "preempted", "ending")
                assert one["blocks"] == []
    assert any(mark in "234" for picture in full for mark in picture["blocks"]["map"])
    made = [picture["totals"]["generated_tokens"] for picture in pictures]
    assert made == sorted(made)
    assert made[-1] > made[0]
    check_clean(llm)


def test_nobody_looks_where_nobody_asks(llm, served, monkeypatch):
    served.service.thread.watch._until = 0.0  # that of other tests has the same engine
    looks = []
    seen = observe.look
    monkeypatch.setattr("oxidize_jax.engine.engine.look", lambda s: looks.append(1) or seen(s))
    with serving(llm) as other, other.http() as http:
        http.post(PATH, json=LONG)
        assert not looks
        http.get("/engine")
        assert len(looks) == 1
        # A crowd that asks costs no more than one who does.
        begin = time.monotonic()
        for _ in range(40):
            http.get("/engine")
        assert len(looks) <= 2 + (time.monotonic() - begin) / watch.EVERY_S
        monkeypatch.setattr(watch, "KEEP_S", 0.0)
        http.get("/engine")
        eventually(lambda: not other.service.thread.watch.is_wanted)
        before = len(looks)
        http.post(PATH, json=LONG)
        assert len(looks) == before


def test_a_look_compiles_nothing_in_the_engine_thread(llm, served, http):
    http.get("/engine")
    before = llm.num_compiles
    for _ in range(3):
        http.get("/engine")
        http.post(PATH, json={**LONG, "max_tokens": 3})
    assert llm.num_compiles == before


def test_a_look_that_fails_fails_no_request(llm, monkeypatch, caplog):
    def fail(state):
        raise RuntimeError("injected")

    with serving(llm) as served, served.http() as http:
        with monkeypatch.context() as patch:
            patch.setattr("oxidize_jax.engine.engine.look", fail)
            assert http.get("/engine").status_code == 503
            assert http.post(PATH, json=LONG).status_code == 200
        assert "could not be looked at" in caplog.text
        assert http.get("/engine").status_code == 200


def test_the_page_needs_no_key_and_its_data_do(llm):
    with serving(llm, api_key="k") as served, served.http() as http:
        assert http.get("/").status_code == 200
        assert http.get("/engine").status_code == 401
        assert http.get("/engine", headers={"Authorization": "Bearer k"}).status_code == 200


def test_a_server_without_a_page(llm):
    with serving(llm, page=False) as served, served.http() as http:
        assert http.get("/").status_code == 404
        assert http.get("/engine").status_code == 404
