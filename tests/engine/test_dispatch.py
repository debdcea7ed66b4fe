"""Dispatch ahead: what is in flight, what is read, and what happens in between."""

import dataclasses

import jax
import numpy as np
import pytest
from fake_model import FakeModel, solo
from host_engine import CONFIG, assert_clean, request, run, tokens

from oxidize_jax.engine import engine as host
from oxidize_jax.engine import programs
from oxidize_jax.engine.engine import Engine, EngineStepError
from oxidize_jax.scheduler.state import HISTORY

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def engine():
    return Engine(CONFIG, FakeModel(), None)


@pytest.fixture
def log(monkeypatch):
    """Dispatches and reads in the order in which the host made them."""
    entries = []
    run_program, fetch = programs.run, host.fetch

    def run(*args):
        entries.append("run")
        return run_program(*args)

    def read(packed):
        entries.append("read")
        return fetch(packed)

    monkeypatch.setattr(programs, "run", run)
    monkeypatch.setattr(host, "fetch", read)
    return entries


def test_a_run_is_dispatched_before_the_one_before_it_is_read(engine, log):
    engine.add(request([1, 2, 3], 20))
    counts = []
    for _ in range(4):
        counts.append(len(tokens(engine.step(2))))
    assert log == ["run", "run", "read", "run", "read", "run", "read", "run", "read"]
    # The first call does not come back with nothing.
    assert counts == [2, 2, 2, 2]
    run(engine)


def test_nothing_is_dispatched_or_read_where_nothing_is_to_do(engine, log):
    assert engine.step() == []
    assert log == []
    engine.add(request([1, 2, 3], 2))
    run(engine)
    log.clear()
    assert engine.step() == []
    assert log == []
    assert engine.step_stats == ()
    assert_clean(engine)


def test_what_is_left_when_all_have_ended_is_not_waited_for(engine, log):
    engine.add(request([1, 2, 3], 2))
    (update,) = engine.step()
    assert update.finish_reason == "length"
    assert log == ["run", "run", "read"]
    engine.add(request([4], 2))
    (update,) = engine.step()
    assert tokens([update]) == solo([4], 2)[1:]
    assert log == ["run", "run", "read"] * 2


@pytest.mark.parametrize("max_steps", [1, 4, 16])
def test_one_transfer_for_each_dispatch_and_no_other(engine, log, max_steps):
    for i in range(7):
        engine.add(request([i] * (1 + 2 * i), 3 + i, num_logprobs=2))
    fetch, calls = host.fetch, []
    # On a CPU an array is read where it lies, which the guard does not count: the log does.
    with jax.transfer_guard_device_to_host("disallow_explicit"), pytest.MonkeyPatch.context() as p:
        p.setattr(host, "fetch", lambda packed: _allowed(fetch, packed))
        while engine.num_unfinished:
            log.clear()
            engine.step(max_steps)
            calls.append((log.count("run"), log.count("read")))
    # Two runs for one read only where there is none from before.
    assert calls[0] == (2, 1)
    assert set(calls[1:]) <= {(1, 1), (2, 1)}
    assert sum(reads for _, reads in calls) == len(calls) > 2


def _allowed(fetch, packed):
    with jax.transfer_guard_device_to_host("allow"):
        return fetch(packed)


def test_the_packed_read_is_the_state(engine):
    engine.add(request(PROMPT, 6, num_logprobs=2))
    engine.add(request([3], 20, num_logprobs=1))
    engine.step(3)
    scheduler = jax.device_get(engine.state.scheduler)
    requests = scheduler.requests
    read = programs.unpack(CONFIG, np.asarray(programs.drain(CONFIG, engine.state.scheduler)))
    assert read.steps == scheduler.totals.steps > 0
    np.testing.assert_array_equal(read.history, scheduler.history)
    for name in ("status", "finish_reason", "row", "num_tokens", "num_cached", "num_preemptions"):
        np.testing.assert_array_equal(getattr(read, name), getattr(requests, name))
    for slot, length in enumerate(requests.num_tokens.tolist()):
        for name in ("tokens", "logprobs", "top_ids", "top_logprobs"):
            whole, window = getattr(requests, name)[slot, :length], getattr(read, name)[slot]
            shown = min(length, programs.WINDOW)
            assert window.dtype == whole.dtype
            np.testing.assert_array_equal(window[len(window) - shown :], whole[length - shown :])


def test_statistics_of_no_step_are_lost(engine):
    for i in range(9):
        engine.add(request([i, i + 1], 25))
    steps, total = [], 0
    while engine.num_unfinished:
        engine.step(16)
        steps += [s.step for s in engine.step_stats]
        total += len(engine.step_stats)
    assert total > 2 * HISTORY
    assert steps == list(range(int(engine.state.scheduler.totals.steps)))


def test_an_abort_drops_what_the_run_under_way_adds(engine):
    kept, dropped = engine.add(request([1, 2], 9)), engine.add(request([3, 4], 9))
    engine.step(1)
    assert engine.abort(dropped)
    updates = run(engine, 1)
    assert set(updates) == {kept}
    assert_clean(engine)


def test_an_abort_of_what_has_ended_unseen_does_not_hit_the_next_in_its_slot(engine):
    config = dataclasses.replace(CONFIG, max_num_seqs=1, max_num_requests=1)
    engine = Engine(config, FakeModel(), None)
    first, second = engine.add(request([1, 2], 3)), engine.add(request([3, 4], 6))
    engine.step(2)  # the second dispatch has ended the first request: nobody has read that
    assert engine.has(first)
    assert engine.abort(first)
    updates = run(engine, 2)
    assert set(updates) == {second}
    assert tokens(updates[second]) == solo([3, 4], 6)[2:]


def test_a_late_read_does_not_reach_the_next_owner_of_a_slot(engine):
    config = dataclasses.replace(CONFIG, max_num_requests=2)
    engine = Engine(config, FakeModel(), None)
    prompts = [[i, i + 1, i + 2] for i in range(8)]
    ids = [engine.add(request(p, 1 + i % 4)) for i, p in enumerate(prompts)]
    updates = run(engine, 1)
    for i, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        assert tokens(updates[request_id]) == solo(prompt, 1 + i % 4)[3:]
        assert [u.finish_reason for u in updates[request_id]].count("length") == 1


def test_a_fork_with_a_run_under_way_tells_child_and_parent_the_same(engine):
    parent = engine.add(request(PROMPT, 12))
    told = tokens(engine.step(3))  # three more are under way
    (child,) = engine.fork(parent, [(0, 1)])
    updates = run(engine, 3)
    rest = solo(PROMPT, 12)[6 + len(told) :]
    assert tokens(updates[parent]) == tokens(updates[child]) == rest
    assert_clean(engine)


def test_a_parent_that_ended_unseen_is_not_forked_and_its_end_is_told(engine):
    parent = engine.add(request(PROMPT, 4))
    engine.step(2)
    assert engine.fork(parent, [(0, 1)]) is None
    assert engine.num_unfinished == 1
    (update,) = engine.step(2)
    assert (update.request_id, update.finish_reason) == (parent, "length")
    assert engine.num_unfinished == 0
    assert_clean(engine)


def test_an_abort_between_a_fork_and_the_next_step_is_not_told_of(engine):
    parent = engine.add(request(PROMPT, 12))
    engine.step(2)
    (child,) = engine.fork(parent, [(0, 1)])
    assert engine.abort(parent)
    assert set(run(engine)) == {child}
    assert_clean(engine)


@pytest.mark.parametrize("where", ["run", "drain", "submit", "abort", "fork", "reset_prefix_cache"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_jx04_whatever_breaks_off_leaves_a_usable_engine(engine, monkeypatch, where, error):
    lost = [engine.add(request([i, 1], 20)) for i in range(2)]
    engine.step(1)
    queued = [engine.add(request([i], 3)) for i in range(4)]
    if where == "abort":
        engine.abort(lost[0])

    def broken(*args):
        raise error("the device went away")

    call = {
        "fork": lambda: engine.fork(lost[0], [(0, 1)]),
        "reset_prefix_cache": engine.reset_prefix_cache,
    }.get(where, lambda: engine.step(1))
    with monkeypatch.context() as patch:
        patch.setattr(programs, where, broken)
        with pytest.raises(error if error is KeyboardInterrupt else EngineStepError):
            call()
    assert not any(engine.has(request_id) for request_id in lost)
    assert not engine._in_flight
    survivors = [request_id for request_id in queued if engine.has(request_id)]
    assert survivors
    updates = run(engine)
    assert set(updates) == set(survivors)
    assert_clean(engine)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_jx04_a_failure_that_shows_when_it_is_read(engine, monkeypatch, error):
    lost = engine.add(request([1, 2], 20))
    engine.step(1)
    with monkeypatch.context() as patch:
        patch.setattr(host, "fetch", lambda _: (_ for _ in ()).throw(error("broken")))
        with pytest.raises(error if error is KeyboardInterrupt else EngineStepError):
            engine.step(1)
    assert not engine.has(lost)
    assert not engine.num_unfinished
    again = engine.add(request([1, 2], 5))
    assert tokens(run(engine)[again]) == solo([1, 2], 5)[2:]
    assert_clean(engine)


def test_an_interrupt_while_the_state_is_made_anew_does_no_harm(engine, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    engine.add(request([1, 2], 20))
    engine.step(1)
    with monkeypatch.context() as patch:
        patch.setattr(programs, "run", interrupted)
        patch.setattr(programs, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step(1)
    again = engine.add(request([1, 2], 5))
    assert tokens(run(engine)[again]) == solo([1, 2], 5)[2:]
    assert_clean(engine)
