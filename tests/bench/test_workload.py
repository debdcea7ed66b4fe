"""Workloads are the same for everyone, and are refused in one line where they cannot run."""

from __future__ import annotations

import hashlib
import json

import pytest

from oxidize_jax.bench import workload
from oxidize_jax.bench.prefix import shareable_tokens
from oxidize_jax.bench.workload import Item

PUBLISHED = "71a2010046f94fe111926a9e39f2bb4bb24d678c6e9f4e4e772d88b84767dcf3"
"""SHA-256 of the 64 requests that figures in benchmarks/README.md are of."""


def test_default_workload_is_the_published_one():
    items = workload.random_workload()
    pairs = [[list(item.prompt_token_ids), item.max_tokens] for item in items]
    text = json.dumps(pairs, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == PUBLISHED
    about = {"requests": 64, "prompt_tokens": 9757, "output_tokens": 9786, "longest": 470}
    assert workload.describe(items) == about


def test_a_workload_is_read_as_it_was_written(tmp_path):
    items = workload.random_workload(5, (1, 3), (2, 2), seed=4, vocab_size=50)
    assert items != workload.random_workload(5, (1, 3), (2, 2), seed=5, vocab_size=50)
    assert {item.max_tokens for item in items} == {2}
    assert all(3 <= token < 50 for item in items for token in item.prompt_token_ids)
    workload.write_workload(tmp_path / "w.json", items)
    assert workload.read_workload(tmp_path / "w.json") == items


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "at least one"),
        ("[3]", "entry 0: must be an object"),
        ('[{"prompt_token_ids": [], "max_tokens": 1}]', "prompt_token_ids must be"),
        ('[{"prompt_token_ids": [1, -1], "max_tokens": 1}]', "prompt_token_ids must be"),
        ('[{"prompt_token_ids": [1], "max_tokens": true}]', "max_tokens=True"),
        ('[{"prompt_token_ids": [1]}]', "max_tokens=None"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, text, words):
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        workload.read_workload(path)
    assert str(path) in str(error.value)


def test_a_request_that_the_engine_cannot_take_is_named():
    items = [Item((1, 2), 3), Item((1, 9), 4)]
    workload.check_fits(items, max_model_len=6, vocab_size=10)
    with pytest.raises(ValueError, match=r"request 1 .* 6 tokens .*max_model_len=5"):
        workload.check_fits(items, max_model_len=5, vocab_size=10)
    with pytest.raises(ValueError, match=r"request 1 .* token id 9"):
        workload.check_fits(items, max_model_len=6, vocab_size=9)


def test_prompts_of_a_group_share_their_prefix_and_no_more():
    items = workload.prefix_workload(3, 4, 10, 2, 5)
    prefixes = [item.prompt_token_ids[:10] for item in items]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert len({item.prompt_token_ids for item in items}) == 12
    assert [item.num_tokens for item in items] == [17] * 12
    assert prefixes != sorted(prefixes, key=prefixes.index)


@pytest.mark.parametrize(
    ("prefix", "suffix", "shared"), [(16, 3, 16), (16, 0, 12), (17, 0, 16), (18, 3, 16), (3, 9, 0)]
)
def test_whole_blocks_of_a_prefix_can_hit_but_never_the_last_token(prefix, suffix, shared):
    assert shareable_tokens(2, 4, prefix, suffix, block_size=4) == 2 * 3 * shared
