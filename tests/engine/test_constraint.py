"""Grammars on the host: masks token by token, beside requests that do not notice."""

import dataclasses

import numpy as np
import pytest
from fake_model import VOCAB, FakeModel, solo
from host_engine import CONFIG, assert_clean, request, run, tokens
from residues import END, Residues, keeps

from oxidize_jax.engine import programs
from oxidize_jax.engine.engine import Engine
from oxidize_jax.engine.recorder import Recorder
from oxidize_jax.engine.replay import replay, replay_scheduler
from oxidize_jax.engine.trace import SetMasks, mask_text
from oxidize_jax.engine.tracefile import dumps, loads, read_trace
from oxidize_jax.sampling.token_mask import pack_token_mask

MODEL = FakeModel()
HOT = 20.0
"""The logits of neighbours differ by 1, and 7 lie between those that the grammar allows."""


def new_engine(**changes):
    return Engine(dataclasses.replace(CONFIG, **changes), MODEL, None, check_invariants=True)


@pytest.fixture(scope="module")
def engine():
    return new_engine()


def constrained(prompt, length, max_new_tokens=20, **options):
    options.setdefault("stop_token_ids", (END,))
    return request(prompt, max_new_tokens, grammar=Residues(length), **options)


def alone(prompt, length, **options):
    """What the request gets with the engine to itself."""
    engine = new_engine()
    request_id = engine.add(constrained(prompt, length, **options))
    return tokens(run(engine)[request_id])


def test_only_what_the_grammar_allows_is_sampled_and_its_end_ends_the_request(engine):
    request_id = engine.add(constrained([1, 2, 3], 6))
    updates = run(engine)[request_id]
    assert tokens(updates)[-1] == END
    assert len(tokens(updates)) == 7
    assert keeps(tokens(updates), 6)
    assert updates[-1].finish_reason == "stop"
    assert not updates[-1].keeps_last
    assert tokens(updates) != solo([1, 2, 3], 7)[3:]  # it would have said something else
    assert_clean(engine)


def test_a_grammar_without_an_end_token_stops_the_request_itself(engine):
    grammar = Residues(4, ends=False)
    request_id = engine.add(request([1, 2, 3], 20, grammar=grammar))
    updates = run(engine)[request_id]
    assert len(tokens(updates)) == 4
    assert keeps(tokens(updates), 4)
    assert updates[-1].finish_reason == "stop"
    assert updates[-1].keeps_last
    assert grammar.tokens == []  # the engine moves a copy
    assert_clean(engine)


def test_max_new_tokens_cuts_off_what_the_grammar_would_go_on_with(engine):
    request_id = engine.add(constrained([4, 5], 9, max_new_tokens=4))
    updates = run(engine)[request_id]
    assert len(tokens(updates)) == 4
    assert keeps(tokens(updates), 9)
    assert updates[-1].finish_reason == "length"
    assert_clean(engine)


def test_batched_is_as_alone_and_others_get_a_token_in_every_step(engine):
    prompt = [7, 8, 9]
    free = engine.add(request(prompt, 12))
    bound = engine.add(constrained([1, 2, 3], 6, temperature=HOT, key=(3, 4)))
    updates = run(engine)
    assert tokens(updates[bound]) == alone([1, 2, 3], 6, temperature=HOT, key=(3, 4))
    assert tokens(updates[free]) == solo(prompt, 12)[3:]
    assert_clean(engine)


def test_others_are_not_delayed_and_a_constrained_row_sits_out_every_second_step():
    engine = new_engine()
    free = engine.add(request([7, 8, 9], 18))
    engine.add(constrained([1, 2, 3], 20))
    seen, rows = [], []
    while engine.has(free):
        for update in engine.step():
            if update.request_id == free:
                seen.append(len(update.token_ids))
        rows += [stats.decode_rows for stats in engine.step_stats]
    # Never more than a token for each run of the device, and never none, till its last.
    assert seen == [1] * 18
    together = rows[2:17]
    assert set(together) == {1, 2}
    # A new block cannot be had within a plan: then it misses one step more.
    assert sum(count == 2 for count in together) >= 6
    engine.abort(1)
    run(engine)


def test_constrained_requests_alone_leave_no_step_out():
    engine = new_engine()
    ids = [engine.add(constrained([i, 2, 3], 5)) for i in range(2)]
    steps = 0
    while engine.num_unfinished:
        engine.step()
        steps += len(engine.step_stats)
    assert steps == 6  # a prompt's step gives its first token; five more, the end among them
    assert not any(map(engine.has, ids))


def test_a_run_ends_where_all_that_is_left_is_paused(engine):
    request_id = engine.add(constrained([1, 2, 3], 6))
    (first,) = engine.step()
    steps = int(engine.state.scheduler.totals.steps)
    engine.state = programs.run(CONFIG, MODEL, None, engine.state, np.int32(16))
    assert int(engine.state.scheduler.totals.steps) == steps
    assert tokens([first, *run(engine)[request_id]]) == alone([1, 2, 3], 6)
    assert_clean(engine)


def test_preempted_is_as_alone(engine):
    # Each grows to 7 blocks of the pool's 12.
    one, two = list(range(10)), list(range(50, 60))
    first = engine.add(constrained(one, 16, temperature=HOT, key=(1, 1)))
    second = engine.add(constrained(two, 16, temperature=HOT, key=(2, 2)))
    updates = run(engine)
    assert updates[second][-1].num_preemptions
    assert tokens(updates[first]) == alone(one, 16, temperature=HOT, key=(1, 1))
    assert tokens(updates[second]) == alone(two, 16, temperature=HOT, key=(2, 2))
    assert_clean(engine)


def test_each_of_a_group_has_a_matcher_of_its_own(engine):
    keys = [(1, i) for i in range(3)]
    ids = engine.add_group(constrained([1, 2, 3], 6, temperature=HOT), keys)
    updates = run(engine)
    texts = [tokens(updates[i]) for i in ids]
    assert all(keeps(text, 6) and len(text) == 7 for text in texts)
    assert len(set(map(tuple, texts))) == 3
    assert texts[1] == alone([1, 2, 3], 6, temperature=HOT, key=(1, 1))
    assert_clean(engine)


def test_a_fork_goes_on_from_where_its_parent_stands(engine):
    parent = engine.add(constrained([1, 2, 3], 9, temperature=HOT, key=(1, 0)))
    got = {parent: []}
    for _ in range(3):
        for update in engine.step():
            got[update.request_id] += update.token_ids
    children = engine.fork(parent, [(5, 5), (6, 6)])
    got |= {child: list(got[parent]) for child in children}
    for request_id, updates in run(engine).items():
        got[request_id] += tokens(updates)
    assert all(keeps(text, 9) and len(text) == 10 for text in got.values()), got
    assert got[parent] == alone([1, 2, 3], 9, temperature=HOT, key=(1, 0))
    assert len(set(map(tuple, got.values()))) == 3
    assert_clean(engine)


def test_abort_and_a_new_owner_of_the_slot(engine):
    ids = [engine.add(constrained([i, 2, 3], 15)) for i in range(3)]
    engine.step()
    engine.step()
    for request_id in ids:
        assert engine.abort(request_id)
    free = engine.add(request([7, 8, 9], 5))
    updates = run(engine)
    assert list(updates) == [free]
    assert tokens(updates[free]) == solo([7, 8, 9], 5)[3:]
    assert_clean(engine)


def test_allowed_and_banned_ids_narrow_what_the_grammar_allows(engine):
    allowed = (*range(0, VOCAB, 2), END)
    request_id = engine.add(
        constrained([1, 2, 3], 6, allowed_token_ids=allowed, banned_token_ids=(0, 14))
    )
    updates = run(engine)[request_id]
    assert keeps(tokens(updates), 6)
    assert len(tokens(updates)) == 7
    assert set(tokens(updates)[:-1]) <= set(range(0, VOCAB, 2)) - {0, 14}


def test_what_the_grammar_and_the_request_contradict_each_other_in(engine):
    with pytest.raises(ValueError, match=r"structured_outputs: the grammar allows no token"):
        engine.add(constrained([1], 6, allowed_token_ids=(1, 2, 3)))
    with pytest.raises(ValueError, match="min_tokens"):
        engine.add(constrained([1], 0, min_new_tokens=2))
    # Later than at the start it ends the request, and the others go on.
    short = engine.add(constrained([1, 2, 3], 2, min_new_tokens=5))
    stops = engine.add(request([1, 2], 20, grammar=Residues(2, ends=False), min_new_tokens=5))
    free = engine.add(request([7, 8, 9], 12))
    updates = run(engine)
    for request_id in (short, stops):
        assert updates[request_id][-1].finish_reason == "abort"
        assert "min_tokens" in updates[request_id][-1].failure
        assert len(tokens(updates[request_id])) == 2
    assert tokens(updates[free]) == solo([7, 8, 9], 12)[3:]
    assert_clean(engine)


def test_bad_words_may_leave_nothing_of_what_the_grammar_allows(engine):
    with pytest.raises(ValueError, match="bad_words"):
        engine.add(constrained([1], 6, allowed_token_ids=(0, 7), bad_words=((0,), (7,))))
    # 6 is the only first token; behind it, 6 is the only one once more, and that is a bad word.

    class Sixes(Residues):
        def allowed(self):
            return [6]

        def copy(self):
            return Sixes(self.length, self.ends, self.tokens)

    request_id = engine.add(request([1, 2, 3], 9, grammar=Sixes(9), bad_words=((6, 6),)))
    updates = run(engine)[request_id]
    assert tokens(updates) == [6]
    assert updates[-1].finish_reason == "abort"
    assert "bad_words" in updates[-1].failure
    assert_clean(engine)


def test_a_token_that_the_grammar_does_not_accept_is_no_output(engine):
    class Liar(Residues):
        """It allows more than it accepts."""

        def mask(self):
            return pack_token_mask(VOCAB, [3]) if len(self.tokens) == 2 else super().mask()

        def copy(self):
            return Liar(self.length, self.ends, self.tokens)

    request_id = engine.add(request([1, 2, 3], 9, grammar=Liar(9)))
    updates = run(engine)[request_id]
    assert len(tokens(updates)) == sum(len(u.logprobs) for u in updates) == 2
    assert updates[-1].finish_reason == "abort"
    assert updates[-1].failure == "structured_outputs: token 3 is not what the grammar allows."
    assert_clean(engine)


def test_a_grammar_that_breaks_ends_its_own_request_only(engine):
    broken = engine.add(request([1, 2, 3], 9, grammar=Residues(9, broken_at=2)))
    free = engine.add(request([7, 8, 9], 12))
    updates = run(engine)
    assert updates[broken][-1].finish_reason == "abort"
    assert updates[broken][-1].failure == "structured_outputs: this grammar is broken"
    assert len(tokens(updates[broken])) == 2
    assert tokens(updates[free]) == solo([7, 8, 9], 12)[3:]
    assert_clean(engine)


def test_an_engine_without_masks_refuses_grammars_by_name():
    engine = Engine(dataclasses.replace(CONFIG, token_mask_size=0), MODEL, None)
    with pytest.raises(ValueError, match=r"structured_outputs: .*token_mask_size=0"):
        engine.add(constrained([1, 2], 4))

    class Wide(Residues):
        def mask(self):
            return np.ones((9,), np.uint32)

    with pytest.raises(ValueError, match=r"shape \[9\]"):
        new_engine().add(request([1, 2], 4, grammar=Wide(3)))


def test_masks_are_events_of_a_trace_that_replays(tmp_path):
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        engine = Engine(CONFIG, MODEL, None, recorder=recorder)
        engine.add(constrained([1, 2, 3], 6))
        engine.add(request([7, 8, 9], 6))
        engine.add_group(constrained([4, 5, 6], 5, temperature=HOT), [(1, 2), (3, 4)])
        run(engine)
    trace = read_trace(path)
    assert any(isinstance(event, SetMasks) for event in trace.events)
    for result in (replay(trace, MODEL, None), replay_scheduler(trace)):
        assert result.difference is None
        assert result.num_compared == result.num_runs > 10
    # The digests of every array are compared, so the mask reaches the same places.
    assert loads(dumps(trace)) == trace


def masks_line(**fields):
    mask = mask_text(pack_token_mask(VOCAB, [1, 2]))
    return {"slots": [0], "pause_at": [3], "masks": [mask]} | fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots": []}, "set_masks.slots has 0 slots"),
        ({"slots": [0, 0], "pause_at": [1, 2], "masks": ["", ""]}, "names a slot twice"),
        ({"pause_at": [1, 2]}, "set_masks.pause_at has 2 entries for 1 slots"),
        ({"masks": ["!"]}, r"set_masks.masks\[0\]: not the packed words"),
        ({"masks": [7]}, r"set_masks.masks\[0\]=7: must be text"),
        ({"masks": [mask_text(np.zeros((99,), np.uint32))]}, "a mask of 17 bytes"),
        ({"slots": [9]}, r"set_masks.slots\[0\]=9"),
    ],
)
def test_masks_that_no_engine_can_have_sent_are_refused(fields, message):
    import json

    from oxidize_jax.engine.trace import Trace

    header = dumps(Trace(config=CONFIG, vocab_size=VOCAB))
    with pytest.raises(ValueError, match=message):
        loads(header + json.dumps({"set_masks": masks_line(**fields)}) + "\n")
    loads(header + json.dumps({"set_masks": masks_line()}) + "\n")
