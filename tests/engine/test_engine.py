"""The host engine with the scripted model: queue, slots, updates, aborts, failures."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import VOCAB, FakeModel, solo
from host_engine import CONFIG, assert_clean, request, run, tokens

from oxidize_jax.engine.engine import Engine, EngineStepError


@pytest.fixture
def engine():
    return Engine(CONFIG, FakeModel(), None, check_invariants=True)


@pytest.mark.parametrize("max_steps", [1, 3, 16])
def test_more_requests_than_slots_all_equal_their_solo_run(engine, max_steps):
    prompts = [[7 * i + j for j in range(1 + 3 * i % 11)] for i in range(8)]
    prompts = [[t % VOCAB for t in prompt] for prompt in prompts]
    ids = [engine.add(request(prompt, 3 + i)) for i, prompt in enumerate(prompts)]
    updates = run(engine, max_steps)
    for i, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        assert tokens(updates[request_id]) == solo(prompt, 3 + i)[len(prompt) :]
        assert [u.finish_reason for u in updates[request_id]][-1] == "length"
        assert all(u.finish_reason is None for u in updates[request_id][:-1])
    assert_clean(engine)


def test_logprobs_come_with_each_token_and_only_as_many_as_asked(engine):
    plain = engine.add(request([1, 2, 3]))
    asked = engine.add(request([1, 2, 3], num_logprobs=1))
    updates = run(engine)
    assert all(update.top_logprobs is None for update in updates[plain])
    logits = -np.arange(VOCAB, dtype=np.float64)
    best = logits[0] - np.log(np.exp(logits).sum())
    for update in updates[asked]:
        assert len(update.token_ids) == len(update.logprobs) == len(update.top_logprobs)
        for token, logprob, top in zip(
            update.token_ids, update.logprobs, update.top_logprobs, strict=True
        ):
            assert [i for i, _ in top] == [token]
            assert top[0][1] == pytest.approx(best, abs=1e-5)
            assert logprob == pytest.approx(best, abs=1e-5)


def test_stop_ids_and_min_tokens(engine):
    prompt = [5, 6, 7]
    whole = solo(prompt, 6)[3:]
    stopped = engine.add(request(prompt, 6, stop_token_ids=(whole[2],)))
    held = engine.add(request(prompt, 6, stop_token_ids=(whole[2],), min_new_tokens=4))
    updates = run(engine)
    assert tokens(updates[stopped]) == solo(prompt, 6, stop_ids=[whole[2]])[3:]
    assert updates[stopped][-1].finish_reason == "stop"
    expected = solo(prompt, 6, stop_ids=[whole[2]], min_tokens=4)[3:]
    assert tokens(updates[held]) == expected
    assert expected[2] != whole[2]


def test_priority_goes_before_arrival_in_the_host_queue():
    engine = Engine(
        dataclasses.replace(CONFIG, max_num_seqs=1, max_num_requests=1), FakeModel(), None
    )
    first = engine.add(request([1]))
    late, urgent = engine.add(request([2])), engine.add(request([3], priority=-1))
    order = list(run(engine))
    assert order == [urgent, first, late]


def test_abort_queued_running_finished_and_unknown(engine):
    running = engine.add(request([1, 2, 3], 20))
    other = engine.add(request([4, 5], 6))
    third, queued = engine.add(request([6])), engine.add(request([8]))
    engine.step(2)
    assert engine.abort(running)
    assert engine.abort(queued)
    assert not engine.abort(running)
    updates = run(engine)
    assert set(updates) == {other, third}
    assert tokens(updates[third]) == solo([6], 5)[1:]
    assert not engine.abort(other)
    assert not engine.abort(999)
    assert_clean(engine)


def test_sc01_what_can_never_run_is_refused_and_the_next_completes(engine):
    small = dataclasses.replace(CONFIG, num_blocks=4)
    engine = Engine(small, FakeModel(), None)
    with pytest.raises(ValueError, match=r"20 tokens and needs 5 blocks of 4.*num_blocks=4"):
        engine.add(request([1] * 20))
    assert engine.num_unfinished == 0
    request_id = engine.add(request([1, 2, 3], 4))
    assert tokens(run(engine)[request_id]) == solo([1, 2, 3], 4)[3:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_token_ids": ()}, "0 tokens"),
        ({"prompt_token_ids": (1,) * 32}, "max_model_len=32"),
        ({"prompt_token_ids": (1, VOCAB)}, rf"prompt_token_ids\[1\]={VOCAB}.*0 to {VOCAB - 1}"),
        ({"prompt_token_ids": (-1,)}, r"prompt_token_ids\[0\]=-1"),
        ({"prompt_token_ids": (2**32 + 7,)}, r"prompt_token_ids\[0\]=4294967303"),
        ({"prompt_token_ids": (1.5,)}, "whole numbers"),
        ({"stop_token_ids": (VOCAB,)}, rf"stop_token_ids\[0\]={VOCAB}"),
        ({"stop_token_ids": (1, 2, 3)}, "max_stop_token_ids=2"),
        ({"num_logprobs": 3}, "max_logprobs=2"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"priority": 2**31}, "priority=2147483648"),
        ({"salt": -1}, "salt=-1"),
        ({"salt": "a"}, "salt='a'"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"min_new_tokens": -5}, "min_new_tokens=-5"),
        ({"num_logprobs": -1}, "num_logprobs=-1"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": None}, "temperature=None"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"typical_p": 0.0}, "typical_p=0.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"presence_penalty": float("nan")}, "presence_penalty=nan"),
        ({"frequency_penalty": True}, "frequency_penalty=True"),
        ({"logit_bias": ((VOCAB, 5.0),)}, rf"logit_bias\[0\]={VOCAB}"),
        ({"logit_bias": ((-1, 5.0),)}, r"logit_bias\[0\]=-1"),
        ({"logit_bias": ((3, 101.0),)}, r"logit_bias\[3\]=101.0"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "twice"),
        ({"logit_bias": ((1, 1.0), (2, 1.0), (3, 1.0))}, "3 ids; the limit is max_logit_bias=2"),
        ({"bad_words": ((1,), (2,), (3,))}, "max_bad_words=2"),
        ({"bad_words": ((1, 2, 3, 4),)}, r"bad_words\[0\] has 4 .* max_bad_word_tokens=3"),
        ({"bad_words": ((),)}, r"bad_words\[0\] has 0 tokens"),
        ({"bad_words": ((1, VOCAB),)}, rf"bad_words\[0\]\[1\]={VOCAB}"),
        ({"allowed_token_ids": (VOCAB,)}, rf"allowed_token_ids\[0\]={VOCAB}"),
        ({"banned_token_ids": (-1,)}, r"banned_token_ids\[0\]=-1"),
        ({"allowed_token_ids": (3,), "banned_token_ids": (3, 4)}, "leaves no token"),
        ({"allowed_token_ids": (3,), "bad_words": ((1, 3),)}, "leaves no token"),
        (
            {"allowed_token_ids": (3,), "stop_token_ids": (3,), "min_new_tokens": 1},
            "leaves no token",
        ),
        ({"banned_token_ids": tuple(range(VOCAB))}, "leaves no token"),
        ({"key": (-1, 0)}, r"key=\(-1, 0\)"),
        ({"key": (2**32, 0)}, "key="),
        ({"key": (1,)}, "key="),
        ({"key": 5}, "key=5"),
        ({"key": (1.5, 2)}, "key="),
    ],
)
def test_bad_requests_are_refused_before_they_touch_the_device(engine, change, message):
    with pytest.raises(ValueError, match=message):
        engine.add(dataclasses.replace(request([1, 2]), **change))
    assert engine.num_unfinished == 0


def test_an_engine_without_masks_refuses_what_needs_one():
    engine = Engine(dataclasses.replace(CONFIG, token_mask_size=0), FakeModel(), None)
    with pytest.raises(ValueError, match=f"banned_token_ids.*token_mask_size=0.*with {VOCAB}"):
        engine.add(request([1], banned_token_ids=(2,)))
    with pytest.raises(ValueError, match=f"token_mask_size=5 does not cover .* {VOCAB}"):
        Engine(dataclasses.replace(CONFIG, token_mask_size=5), FakeModel(), None)


@pytest.mark.parametrize("max_steps", [0, 17])
def test_steps_per_dispatch_are_bounded(engine, max_steps):
    with pytest.raises(ValueError, match=f"max_steps={max_steps}"):
        engine.step(max_steps)


@dataclasses.dataclass(frozen=True)
class BrokenModel(FakeModel):
    """Fails at run time when ``params`` says so, after the state was donated."""

    def forward(self, params, kv, batch):
        def check(broken):
            if broken:
                raise RuntimeError("the model broke")
            return np.int32(0)

        zero = jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.int32), params)
        logits, kv = super().forward(None, kv, batch)
        return logits + zero.astype(jnp.float32), kv


@pytest.mark.filterwarnings("ignore")
def test_jx04_sc11_a_failed_step_loses_what_ran_and_nothing_else():
    engine = Engine(CONFIG, BrokenModel(), np.bool_(False))
    before = engine.state
    warm = engine.add(request([9, 9], 2))
    run(engine)
    # The old handle was donated: it cannot be read any more, and nobody holds it.
    assert before.kv.is_deleted()
    lost = [engine.add(request([1, 2, 3], 20)), engine.add(request([4], 20))]
    engine.step(1)
    queued = [engine.add(request([i], 5)) for i in (20, 21)]
    engine.step(1)
    engine.params = np.bool_(True)
    # A step returns once the run before it is read: the failure may show in the next one.
    with pytest.raises(EngineStepError, match="running requests were lost"):
        run(engine)
    engine.params = np.bool_(False)
    assert not engine.has(warm)
    assert not any(engine.has(request_id) for request_id in lost)
    survivors = [request_id for request_id in queued if engine.has(request_id)]
    assert survivors == queued[1:]
    again = engine.add(request([1, 2, 3], 6))
    updates = run(engine)
    assert tokens(updates[again]) == solo([1, 2, 3], 6)[3:]
    assert tokens(updates[survivors[0]]) == solo([21], 5)[1:]
    assert_clean(engine)


def test_jx04_every_buffer_of_the_state_is_its_own(engine):
    leaves = jax.tree.leaves(engine.state)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]
    assert len(set(pointers)) == len(pointers)


def test_nothing_compiles_once_every_shape_has_run(engine):
    def load(seed):
        rng = np.random.default_rng(seed)
        for _ in range(12):
            prompt = rng.integers(0, VOCAB, rng.integers(1, 20)).tolist()
            engine.add(request(prompt, int(rng.integers(1, 9)), top_k=int(rng.integers(0, 5))))
        run(engine, 4)

    load(0)
    load(1)
    count = _COMPILED[0]
    assert count
    load(2)
    assert _COMPILED[0] == count


def test_sc14_one_small_request_is_the_whole_warm_up():
    config = dataclasses.replace(CONFIG, max_num_batched_tokens=24, num_blocks=16)
    engine = Engine(config, FakeModel(), None)
    engine.add(request([1], 1))
    run(engine)
    count = _COMPILED[0]
    # The largest step there is: every row prefills until the budget is used up.
    for length in (31, 30, 29, 1):
        engine.add(request([length] * length, 1))
    updates = engine.step(1)
    assert engine.step_stats[0].scheduled_tokens == 24
    run(engine)
    assert not updates
    assert _COMPILED[0] == count


_COMPILED = [0]


def _count(event, *_, **__):
    _COMPILED[0] += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count)
