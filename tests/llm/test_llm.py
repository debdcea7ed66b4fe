"""LLM: what goes in and out, and that neighbours, chunks and streams change nothing."""

import collections
import dataclasses
import itertools
import math
import threading
import time

import numpy as np
import pytest

from oxidize_jax import LLM, SamplingParams
from oxidize_jax.engine.replay import replay_scheduler
from oxidize_jax.engine.tracefile import read_trace
from oxidize_jax.model.reference import reference_forward
from oxidize_jax.prompts import CacheSalts

GREEDY = SamplingParams(temperature=0, max_tokens=8)
WARM = SamplingParams(temperature=1, max_tokens=12, seed=7, ignore_eos=True)


def ids_of(outputs):
    return [[c.token_ids for c in output.outputs] for output in outputs]


def test_one_and_many_prompts_in_every_form(llm):
    text = "Hello"
    ids = llm.tokenizer.encode(text)
    (one,) = llm.generate(text, GREEDY)
    assert one.prompt == text
    assert one.prompt_token_ids == tuple(ids)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}, np.array(ids)]
    many = llm.generate(forms, GREEDY)
    assert ids_of(many) == [[one.outputs[0].token_ids]] * len(forms)
    assert [output.prompt for output in many] == [text, None, text, None, None]
    assert ids_of(llm.generate(ids, GREEDY)) == ids_of([one])
    assert llm.generate([], GREEDY) == []


def test_greedy_tokens_and_logprobs_are_those_of_the_dense_model(llm):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
    (output,) = llm.generate("The sea", params)
    completion = output.outputs[0]
    tokens = list(output.prompt_token_ids)
    leaves = {n: np.asarray(a) for n, a in llm.engine.params.items()}
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        logits = np.asarray(
            reference_forward(llm.model_config, leaves, np.array(tokens, np.int32))
        )[-1].astype(np.float64)
        logprobs = logits - logits.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        best = np.argsort(-logprobs)[:3].tolist()
        assert token == best[0]
        assert list(entry) == best
        assert [entry[i].rank for i in best] == [1, 2, 3]
        for i in best:
            assert entry[i].logprob == pytest.approx(logprobs[i], abs=1e-4)
        tokens.append(token)
    assert completion.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True))
    )


def test_logprobs_none_zero_and_outside_the_alternatives(llm):
    none, zero, one = llm.generate(
        ["a"] * 3,
        [SamplingParams(seed=1, max_tokens=9, logprobs=k, temperature=5) for k in (None, 0, 1)],
    )
    assert none.outputs[0].logprobs is None
    tokens = none.outputs[0].token_ids
    assert zero.outputs[0].token_ids == one.outputs[0].token_ids == tokens
    assert [list(entry) for entry in zero.outputs[0].logprobs] == [[t] for t in tokens]
    ranks = [e[t].rank for t, e in zip(tokens, one.outputs[0].logprobs, strict=True)]
    assert [e[t].rank for t, e in zip(tokens, zero.outputs[0].logprobs, strict=True)] == ranks
    assert max(ranks) > 3
    assert [len(e) for e in one.outputs[0].logprobs] == [1 + (rank > 1) for rank in ranks]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_ranks_of_tokens_in_prompt_and_output_are_those_of_a_score(llm, count):
    params = SamplingParams(
        seed=1, max_tokens=9, logprobs=count, prompt_logprobs=count, temperature=5, ignore_eos=True
    )
    (output,) = llm.generate("a prompt", params)
    ids, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
    (scored,) = llm.score([[*output.prompt_token_ids, *ids]])
    prompt = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    ranks = [None if entry is None else entry[token].rank for token, entry in prompt]
    ranks += [entry[token].rank for token, entry in zip(ids, entries, strict=True)]
    assert ranks == list(scored.token_ranks)
    assert max(ranks[1:]) > 3


def test_a_token_outside_the_alternatives_has_its_rank_in_the_vocabulary(llm):
    params = SamplingParams(n=2, seed=1, max_tokens=20, logprobs=2, temperature=5, ignore_eos=True)
    (output,) = llm.generate("a", params)
    for completion in output.outputs:
        ids = completion.token_ids
        (scored,) = llm.score([[*output.prompt_token_ids, *ids]])
        ranks = [e[t].rank for t, e in zip(ids, completion.logprobs, strict=True)]
        assert ranks == list(scored.token_ranks[-len(ids) :])
        assert max(ranks) > 2


def test_a_seed_gives_the_same_tokens_alone_batched_and_under_any_cut(llm, make_llm):
    prompts = ["a", "Hello there, how is the weather", "xyz" * 9, "0123456789"]
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, seed=s, max_tokens=12, ignore_eos=True)
        for t, k, p, s in [(1, 0, 1, 0), (0.7, 5, 1, 2**64 - 1), (2, 0, 0.9, 3), (0, 0, 1, None)]
    ]
    alone = [ids_of(llm.generate(prompt, p)) for prompt, p in zip(prompts, params, strict=True)]
    together = [[ids] for ids in ids_of(llm.generate(prompts, params))]
    assert together == alone
    reversed_order = ids_of(llm.generate(prompts[::-1], params[::-1]))[::-1]
    assert [[ids] for ids in reversed_order] == alone
    # One block for each 4 tokens, and too few: every row is preempted sooner or later.
    tight = make_llm(num_blocks=14, max_num_batched_tokens=5, policy="decode_first")
    assert [[ids] for ids in ids_of(tight.generate(prompts, params))] == alone
    assert int(tight.engine.state.scheduler.totals.preemptions) > 0


def test_n_children_differ_repeat_and_the_first_is_the_lone_one(llm):
    params = SamplingParams(n=3, temperature=1, seed=11, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate("Hello", params)
    children = [c.token_ids for c in output.outputs]
    assert len(set(children)) == 3
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert output.usage.completion_tokens == 36
    assert ids_of(llm.generate("Hello", params)) == [children]
    (lone,) = llm.generate(
        "Hello", SamplingParams(temperature=1, seed=11, max_tokens=12, ignore_eos=True)
    )
    assert lone.outputs[0].token_ids == children[0]


def test_requests_without_a_seed_differ_from_each_other_and_repeat_with_the_engines(make_llm):
    params = SamplingParams(temperature=1, max_tokens=12, ignore_eos=True)

    def run(seed):
        llm = make_llm(seed=seed)
        return ids_of(llm.generate(["a", "a"], params))

    first = run(1)
    assert first[0] != first[1]
    assert run(1) == first
    assert run(2) != first


@pytest.mark.parametrize("params", [GREEDY, WARM, SamplingParams(n=2, seed=5, max_tokens=9)])
def test_stream_joined_is_the_one_shot_result(llm, params):
    deltas = list(llm.stream("Once upon", params))
    (output,) = llm.generate("Once upon", params)
    for completion in output.outputs:
        mine = [d for d in deltas if d.index == completion.index]
        assert "".join(d.text for d in mine) == completion.text
        assert sum((d.token_ids for d in mine), ()) == completion.token_ids
        assert [d.finish_reason for d in mine][-1] == completion.finish_reason
        assert all(d.finish_reason is None for d in mine[:-1])


def test_streams_interleave_and_a_closed_one_is_aborted(llm):
    (a,), (b,) = llm.generate("aaa", WARM), llm.generate("bbb", WARM)
    first, second, third = (llm.stream(p, WARM) for p in ("aaa", "bbb", "ccc"))
    next(third)
    got = {"a": "", "b": ""}
    for delta_a, delta_b in itertools.zip_longest(first, second):
        got["a"] += delta_a.text if delta_a else ""
        got["b"] += delta_b.text if delta_b else ""
    assert got == {"a": a.outputs[0].text, "b": b.outputs[0].text}
    third.close()
    assert llm.engine.num_unfinished == 0


def test_a_stop_string_cuts_text_and_ends_the_request(llm):
    (whole,) = llm.generate("Hello", WARM)
    text = whole.outputs[0].text
    stop = text[4:6]
    cut = text.index(stop)
    params = SamplingParams(
        temperature=1, max_tokens=12, seed=7, ignore_eos=True, stop=["@@", stop]
    )
    (output,) = llm.generate("Hello", params)
    completion = output.outputs[0]
    assert completion.text == text[:cut]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == whole.outputs[0].token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) < len(whole.outputs[0].token_ids)
    assert "".join(d.text for d in llm.stream("Hello", params)) == text[:cut]


def test_stop_token_ids_end_without_their_text_and_say_so(llm):
    (whole,) = llm.generate("Hello", WARM)
    ids = whole.outputs[0].token_ids
    stop = next(t for i, t in enumerate(ids) if i > 2 and t not in ids[:i])
    at = ids.index(stop)
    params = SamplingParams(
        temperature=1, max_tokens=12, seed=7, ignore_eos=True, stop_token_ids=[stop]
    )
    completion = llm.generate("Hello", params)[0].outputs[0]
    assert completion.token_ids == ids[: at + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == llm.tokenizer.decode(ids[:at], prompt_ids=whole.prompt_token_ids)
    later = dataclasses.replace(WARM, stop_token_ids=[stop], min_tokens=12)
    held = llm.generate("Hello", later)[0].outputs[0]
    assert stop not in held.token_ids
    assert len(held.token_ids) == 12


def test_end_of_sequence_stops_unless_ignored(make_llm):
    llm = make_llm()
    eos = llm.tokenizer.eos_token_ids[0]
    prompt = llm.tokenizer.encode("x")
    # A head that likes <|im_end|> most: copy its row where greedy decoding will look.
    head = np.array(llm.engine.params["lm_head.weight"])
    (free,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    best = free.outputs[0].token_ids[0]
    head[[eos, best]] = head[[best, eos]]
    llm.engine.params = {**llm.engine.params, "lm_head.weight": head}
    (stopped,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3))
    assert stopped.outputs[0].token_ids == (eos,)
    assert stopped.outputs[0].text == ""
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", None)
    (ignored,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(ignored.outputs[0].token_ids) == 3
    (forced,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3, min_tokens=2))
    assert eos not in forced.outputs[0].token_ids[:2]


def test_usage_counts_prompt_completion_and_cached_tokens(llm):
    prompt = "a prompt of its own, " * 2
    first = llm.generate(prompt, GREEDY)[0]
    again = llm.generate(prompt, GREEDY)[0]
    assert ids_of([first]) == ids_of([again])
    assert first.usage.prompt_tokens == len(prompt)
    assert first.usage.completion_tokens == len(first.outputs[0].token_ids)
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens == (len(prompt) - 1) // 4 * 4


def test_max_tokens_none_fills_the_context(llm):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate("Hello", params)
    assert len(output.outputs[0].token_ids) == 64 - 5
    assert output.outputs[0].finish_reason == "length"


def test_sc02_a_request_that_outgrows_the_pool_keeps_its_tokens(make_llm):
    llm = make_llm(num_blocks=4)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    long, short = llm.generate(["0123456789", "ab"], [params, GREEDY])
    assert long.outputs[0].finish_reason == "length"
    assert long.outputs[0].stop_reason == "kv_cache_exhausted"
    assert len(long.outputs[0].token_ids) == 16 - 10 + 1
    assert short.outputs[0].finish_reason in ("length", "stop")


def test_chat_uses_the_template_for_one_and_for_many(llm):
    conversation = [{"role": "user", "content": "Hi"}]
    (one,) = llm.chat(conversation, GREEDY)
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert llm.tokenizer.decode(one.prompt_token_ids, skip_special_tokens=False) == expected
    assert one.prompt == expected
    many = llm.chat([conversation, conversation], GREEDY)
    assert ids_of(many) == ids_of([one]) * 2


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt is empty"),
        ([[]], "0 tokens"),
        (["fine", ""], r"prompts\[1\]: prompt is empty"),
        ("x" * 64, "64 tokens, but max_model_len=64"),
        ([1, 2, 259], r"prompt_token_ids\[2\]=259: .* 0 to 258"),
        ([[1, -1]], r"prompt_token_ids\[1\]=-1"),
        ([[1, 2**40]], r"prompt_token_ids\[1\]=1099511627776"),
        ([[1, True]], r"prompt_token_ids\[1\]=True"),
        ([[1, "a"]], r"prompt_token_ids\[1\]='a'"),
        ({"text": "a"}, "exactly one of"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one of"),
        (None, "NoneType"),
        (3, "int"),
        (b"a", "bytes"),
        (bytearray(b"a"), "bytearray"),
        ([memoryview(b"a")], "memoryview"),
        ({1: 2, "a": 3}, "exactly one of"),
        ([[2**70]], r"prompt_token_ids\[0\]=1180591620717411303424"),
        ([None], "NoneType"),
    ],
)
def test_bad_prompts_are_one_line_and_nothing_runs(llm, prompts, message):
    steps = int(llm.engine.state.scheduler.totals.steps)
    with pytest.raises(ValueError, match=message) as error:
        llm.generate(prompts, GREEDY)
    assert "\n" not in str(error.value)
    assert llm.engine.num_unfinished == 0
    assert int(llm.engine.state.scheduler.totals.steps) == steps


def test_a_bad_conversation_among_good_ones_is_named(llm):
    good = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ValueError, match=r"conversations\[1\]: "):
        llm.chat([good, [{"role": "user"}]], GREEDY)


@pytest.mark.parametrize("messages", [None, "hi", [], [{}], [{"role": "user"}], [["x"]], [3]])
def test_bad_conversations_are_refused(llm, messages):
    with pytest.raises(ValueError, match="messages"):
        llm.chat(messages, GREEDY)


def test_parameters_must_match_the_prompts_and_the_engine(llm):
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        llm.generate("a", [GREEDY, GREEDY])
    with pytest.raises(ValueError, match="sampling_params is float"):
        llm.generate("a", 0.5)
    for name in ("logprobs", "prompt_logprobs"):
        words = rf"^{name}=4: the limit is max_logprobs=3; .* LLM\(max_logprobs=\.\.\.\)"
        with pytest.raises(ValueError, match=words):
            llm.generate("a", SamplingParams(**{name: 4}))
    with pytest.raises(ValueError, match=r"stop_token_ids\[0\]=259"):
        llm.generate("a", SamplingParams(ignore_eos=True, stop_token_ids=[259]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_length": 9}, "Did you mean 'max_model_len'"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"max_model_len": 129}, "max_model_len=129 .* 128 positions"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"block_size": 2.5}, r"block_size=2\.5"),
        ({"policy": "fair"}, "policy='fair'"),
        ({"attention": "flash"}, "flash"),
        ({"kv_cache_gib": math.nan}, "kv_cache_gib=nan"),
        ({"kv_cache_gib": 5e-7}, "lower block_size or raise kv_cache_gib"),
        ({"kv_cache_gib": 1e-6}, "lower max_model_len to 4 or raise"),
        ({"max_num_batched_tokens": 10**9}, "max_num_batched_tokens=1000000000.*GiB are free"),
        ({"max_num_seqs": 10**8}, "max_num_seqs=100000000"),
        ({"seed": -1}, "seed=-1"),
        ({"tokenizer": "no/such/folder"}, "no/such/folder"),
    ],
)
def test_bad_options_are_one_line(make_llm, options, message):
    with pytest.raises(ValueError, match=message) as error:
        make_llm(**options)
    assert "\n" not in str(error.value)


def test_a_missing_model_names_what_was_looked_for():
    with pytest.raises(ValueError, match=r"no-such\.gguf"):
        LLM("./no-such.gguf")


def test_bfloat16_weights_and_cache_run(make_llm):
    llm = make_llm(dtype="bfloat16")
    (output,) = llm.generate("Hello", GREEDY)
    assert len(output.outputs[0].token_ids) == 8


def test_threads_share_one_llm(llm):
    expected = llm.generate("Hello", WARM)[0].outputs[0].text
    results = []

    def one_shot():
        results.append(llm.generate("Hello", WARM)[0].outputs[0].text)

    def streamed():
        results.append("".join(d.text for d in llm.stream("Hello", WARM)))

    threads = [threading.Thread(target=work) for work in (one_shot, streamed) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 8


def test_many_more_prompts_than_slots(llm):
    prompts = [[i % 250, i // 250] for i in range(700)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert [output.prompt_token_ids for output in outputs] == [tuple(p) for p in prompts]
    assert all(len(output.outputs[0].token_ids) == 2 for output in outputs)


def test_an_interrupted_call_leaves_the_llm_usable(llm, monkeypatch):
    expected = ids_of(llm.generate("Hello", WARM))
    step, calls = llm.engine.step, []

    def interrupted(max_steps):
        calls.append(max_steps)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return step(1)

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Hello", "there"], WARM)
    monkeypatch.undo()
    assert llm.engine.num_unfinished == 0
    assert ids_of(llm.generate("Hello", WARM)) == expected


def test_children_of_a_prompt_are_forks_of_the_first(make_llm):
    llm = make_llm()
    (output,) = llm.generate(["abcdefghijk"], SamplingParams(n=3, seed=4, max_tokens=6))
    totals = llm.engine.state.scheduler.totals
    length = len(output.prompt_token_ids)
    assert int(totals.forked_tokens) == 2 * (length - 1)
    assert output.usage.cached_tokens == 0
    # The prompt is computed once; a fork computes its last token again, for the logits.
    computed = length + 2 + output.usage.completion_tokens - 3
    assert int(totals.scheduled_tokens) == computed


def test_prompts_of_different_salts_share_no_cache(llm):
    prompt = "a prompt of some length, to be hit"

    def cached(**salt):
        (output,) = llm.generate([{"prompt": prompt, **salt}], GREEDY)
        return output.usage.cached_tokens, output.outputs[0].token_ids

    llm.reset_prefix_cache()
    none, tokens = cached()
    assert none == 0
    hit, same = cached()
    assert hit > 0
    assert same == tokens
    assert cached(cache_salt="one") == (0, tokens)
    assert cached(cache_salt="two") == (0, tokens)
    assert cached(cache_salt="one") == (hit, tokens)
    llm.reset_prefix_cache()
    assert cached() == (0, tokens)


def test_a_conversation_has_a_salt_too(llm):
    messages = [{"role": "user", "content": "hello"}]
    llm.reset_prefix_cache()
    cached = [
        llm.chat(messages, GREEDY, cache_salt=salt)[0].usage.cached_tokens
        for salt in ("a", "b", "a", None)
    ]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0
    assert cached[3] == 0
    with pytest.raises(ValueError, match="cache_salt=5"):
        llm.chat(messages, GREEDY, cache_salt=5)


def test_a_key_that_a_prompt_does_not_have_is_refused(llm):
    with pytest.raises(ValueError, match=r"'cachesalt'.*Did you mean 'cache_salt'"):
        llm.generate([{"prompt": "abc", "cachesalt": "a"}], GREEDY)


def test_a_trace_is_kept_until_a_model_is_there(make_llm, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("precious")
    with pytest.raises(ValueError, match="max_num_seqs"):
        make_llm(trace=str(path), max_num_seqs=0)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("salt", ["", 5, ["x"]])
def test_a_salt_must_be_text(llm, salt):
    with pytest.raises(ValueError, match="cache_salt="):
        llm.generate([{"prompt": "abc", "cache_salt": salt}], GREEDY)


def test_salts_are_numbered_and_a_forgotten_one_gets_a_new_number():
    salts = CacheSalts(limit=2)
    numbers = [salts.number({"prompt": "x", "cache_salt": s}) for s in "abacb"]
    assert numbers == [1, 2, 1, 3, 4]
    assert salts.number("x") == salts.number({"prompt": "x"}) == 0


def test_two_threads_never_get_the_number_of_one_salt():
    """It would let one tenant read what the other has in the cache."""
    salts, late = CacheSalts(), []

    def number(salt):
        return salts.number({"prompt": "x", "cache_salt": salt})

    other = threading.Thread(target=lambda: late.append(number("b")))

    class Interrupted(collections.OrderedDict):
        def __setitem__(self, salt, value):
            super().__setitem__(salt, value)
            if salt == "a":
                other.start()
                other.join(0.2)  # as long as it would take, were it let in

    salts._numbers = Interrupted()
    first = number("a")
    other.join()
    assert [first, *late] == [1, 2]


def test_a_trace_of_an_llm_replays_without_the_model(make_llm, tmp_path):
    path = tmp_path / "run.jsonl"
    llm = make_llm(trace=str(path))
    llm.generate(["abcdef", "ghij"], SamplingParams(n=2, seed=3, max_tokens=5))
    replayed = replay_scheduler(read_trace(path))
    assert replayed.difference is None
    state = replayed.state
    assert (state.requests.tokens == llm.engine.state.scheduler.requests.tokens).all()


def test_a_trace_that_cannot_be_written_is_refused_before_the_model_loads(make_llm, tmp_path):
    with pytest.raises(ValueError, match="run\\.jsonl"):
        make_llm(trace=str(tmp_path / "no" / "run.jsonl"))


def test_a_failed_reset_loses_what_ran_and_holds_up_nobody(llm, monkeypatch):
    stream = llm.stream("The sun", SamplingParams(max_tokens=30, ignore_eos=True))
    next(stream)
    waiting, entered = [], threading.Event()

    def wait_for_it():
        entered.wait(30)
        waiting.append(llm.generate("a", SamplingParams(max_tokens=2)))

    def fail(*_):
        entered.set()
        time.sleep(0.2)  # the other thread finds the engine taken
        raise RuntimeError("no memory")

    thread = threading.Thread(target=wait_for_it, daemon=True)
    thread.start()
    with monkeypatch.context() as patch:
        patch.setattr("oxidize_jax.engine.programs.reset_prefix_cache", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            llm.reset_prefix_cache()
    thread.join(60)
    assert waiting, "it waits for ever"
    with pytest.raises(RuntimeError, match="was lost in a failed step of another caller"):
        list(stream)
