"""How texts come out of an LLM whose engine is one run ahead, for one caller and for several."""

import threading

import pytest

from oxidize_jax import SamplingParams
from oxidize_jax.completion import Group
from oxidize_jax.engine.engine import STEPS_PER_DISPATCH, EngineStepError
from oxidize_jax.runner import steps_per_dispatch

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=1, max_tokens=40, seed=7, ignore_eos=True)


@pytest.fixture
def sizes(llm, monkeypatch):
    """``max_steps`` of every step of the engine."""
    taken, step = [], llm.engine.step

    def spy(max_steps):
        taken.append(max_steps)
        return step(max_steps)

    monkeypatch.setattr(llm.engine, "step", spy)
    return taken


def test_whole_texts_take_long_dispatches_and_streams_single_steps(llm, sizes):
    llm.generate(["abc", "de"], LONG)
    assert set(sizes) == {STEPS_PER_DISPATCH}
    assert len(sizes) <= 4
    sizes.clear()
    deltas = list(llm.stream("abc", LONG))
    assert set(sizes) == {1}
    # Each call brings a token; most are a text of their own, and some only a part of one.
    assert len(sizes) == sum(len(d.token_ids) for d in deltas) == 40
    assert len(deltas) > 20


def test_a_stream_that_nobody_reads_does_not_hold_up_the_others(llm, sizes):
    stream = llm.stream("abc", LONG)
    next(stream)
    sizes.clear()
    llm.generate(["xy"] * 3, LONG)
    # Single steps until there is text for the stream's reader, and long ones from then on.
    singles = sizes.index(STEPS_PER_DISPATCH)
    assert 1 <= singles <= 8
    assert set(sizes[singles:]) == {STEPS_PER_DISPATCH}
    assert set(sizes[:singles]) == {1}
    (whole,) = llm.generate("abc", LONG)
    text = "".join(d.text for d in stream)
    assert whole.outputs[0].text.endswith(text)


class _Shown(Group):
    def __init__(self, num_unshown):
        self._count = num_unshown

    @property
    def num_unshown(self):
        return self._count


@pytest.mark.parametrize(
    ("unshown", "steps"),
    [
        ([], STEPS_PER_DISPATCH),
        ([0], 1),
        ([2], STEPS_PER_DISPATCH),
        ([1, 0], 1),
        ([1, 3], STEPS_PER_DISPATCH),
    ],
)
def test_the_policy(unshown, steps):
    assert steps_per_dispatch([_Shown(count) for count in unshown]) == steps


def test_the_first_step_of_a_stream_brings_its_first_token(llm, sizes):
    stream = llm.stream("abc", GREEDY)
    first = next(stream)
    assert first.token_ids
    # A step for each token whose text is not whole yet, and none before the first.
    assert len(sizes) == len(first.token_ids)
    stream.close()


def test_text_behind_a_stop_string_that_was_under_way_is_dropped(llm):
    (whole,) = llm.generate("Hello", LONG)
    text = whole.outputs[0].text
    stop = text[6:8]
    params = SamplingParams(temperature=1, max_tokens=40, seed=7, ignore_eos=True, stop=[stop])
    other = LONG
    cut, neighbour = llm.generate(["Hello", "Hello"], [params, other])
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert cut.outputs[0].stop_reason == stop
    assert neighbour.outputs[0].token_ids == whole.outputs[0].token_ids
    assert "".join(d.text for d in llm.stream("Hello", params)) == cut.outputs[0].text


def test_threads_are_served_by_whoever_runs_the_engine(llm):
    """A batch of many runs; streams and a small batch of other threads end long before it."""
    expected = llm.generate("Hello", GREEDY)[0].outputs[0].text
    ended = []

    def big():
        llm.generate([[i % 250, 7] for i in range(60)], LONG)
        ended.append("big")

    def small():
        assert llm.generate("Hello", GREEDY)[0].outputs[0].text == expected
        ended.append("small")

    def streamed():
        assert "".join(d.text for d in llm.stream("Hello", GREEDY)) == expected
        ended.append("stream")

    threads = [threading.Thread(target=work) for work in (big, small, streamed, small, streamed)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == ["big", "small", "small", "stream", "stream"]


def test_a_failed_step_is_an_error_for_every_caller_and_the_next_call_works(llm, monkeypatch):
    expected = llm.generate("Hello", GREEDY)[0].outputs[0].token_ids
    stream = llm.stream("abc", LONG)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr("oxidize_jax.engine.programs.run", lambda *_: 1 / 0)
        with pytest.raises(EngineStepError, match="running requests were lost"):
            llm.generate("Hello", GREEDY)
    with pytest.raises(EngineStepError, match=r"lost in a failed step of another caller"):
        list(stream)
    assert not llm._runner._running
    assert not llm._runner._lost
    assert not llm._runner._streams
    assert llm.generate("Hello", GREEDY)[0].outputs[0].token_ids == expected


def test_an_interrupt_between_the_read_and_the_text_leaves_no_gap(llm, monkeypatch):
    expected = llm.generate("Hello", GREEDY)[0].outputs[0].token_ids
    stream = llm.stream("abc", LONG)
    next(stream)

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._runner, "_hand_over", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("Hello", GREEDY)
    with pytest.raises(EngineStepError, match="lost"):
        list(stream)
    assert not llm._runner._lost
    assert llm.generate("Hello", GREEDY)[0].outputs[0].token_ids == expected
