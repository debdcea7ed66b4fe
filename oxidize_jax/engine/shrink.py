"""Cut a failing trace down to the few events that matter, and write them as a test.

Delta debugging (Zeller and Hildebrandt 2002, ``ddmin``): drop ever smaller parts of the
events as long as the rest still fails. What is dropped first is a request with all that
happens to it, so that little of what is tried makes no sense.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from oxidize_jax.engine.replay import TraceError, replay_scheduler
from oxidize_jax.engine.trace import Abort, Event, Fork, Restart, Run, Submit, Trace, scripted

Fails: TypeAlias = Callable[[Trace], bool]
Events: TypeAlias = tuple[Event, ...]


def fault(trace: Trace) -> Exception | None:
    """What a replay without a model raises; None for a trace that it gets through.

    Raises TraceError for events that make no sense: that is no fault of the engine.
    """
    try:
        replay_scheduler(trace)
    except TraceError:
        raise
    except Exception as error:
        return error
    return None


def fails_like(error: Exception) -> Fails:
    """Whether a trace fails in the same way: the error's type, and its message up to a colon."""

    def fails(trace: Trace) -> bool:
        try:
            found = fault(trace)
        except TraceError:
            return False
        return found is not None and _kind(found) == _kind(error)

    return fails


def _kind(error: Exception) -> tuple[type, str]:
    return type(error), str(error).partition(":")[0]


def shrink(trace: Trace, fails: Fails, *, progress: Callable[[Trace], None] | None = None) -> Trace:
    """The smallest trace found that still fails. Its events carry their own tokens.

    Args:
      fails: whether a trace fails; it is called some hundred times, and must say no where
        events make no sense (see :func:`fails_like`).
      progress: called with the best trace each time one has been found.

    Raises ValueError if ``trace`` does not fail.
    """

    def holds(events: Events) -> bool:
        smaller = dataclasses.replace(trace, events=events)
        found = fails(smaller)
        if found and progress is not None:
            progress(smaller)
        return found

    trace = scripted(trace)
    events = trace.events
    if not holds(events):
        raise ValueError("the trace does not fail: there is nothing to cut down.")
    events = _prefix(events, holds)
    before: Events = ()
    while events != before:
        before = events
        events = _drop(events, _requests(events), holds)
        events = _drop(events, [{index} for index, e in enumerate(events) if _is_free(e)], holds)
        for simpler in (_merged_runs, _shorter_runs, _plainer_requests):
            events = _simplify(events, simpler, holds)
    return dataclasses.replace(trace, events=events)


def _prefix(events: Events, holds: Callable[[Events], bool]) -> Events:
    """Cut off what comes after the failure, by bisection."""
    passes, fails = 0, len(events)
    while fails - passes > 1:
        middle = (passes + fails) // 2
        if holds(events[:middle]):
            fails = middle
        else:
            passes = middle
    return events[:fails]


def _requests(events: Events) -> list[set[int]]:
    """Indices of the events of each request, its forks and their aborts included."""
    groups: list[set[int]] = []
    owner: dict[int, set[int]] = {}
    for index, event in enumerate(events):
        if isinstance(event, Submit):
            parent = None if event.fork_of is None else owner.get(event.fork_of)
            if parent is None:
                groups.append(parent := set())
            parent.add(index)
            owner[event.slot] = parent
        elif isinstance(event, Fork) and event.parent in owner:
            owner[event.parent].add(index)
            owner |= dict.fromkeys(event.children, owner[event.parent])
        elif isinstance(event, Abort) and event.slot in owner:
            owner[event.slot].add(index)
        elif isinstance(event, Restart):
            owner = {}
    return groups


def _is_free(event: Event) -> bool:
    """Whether an event can go while those of its request stay."""
    return not isinstance(event, Submit)


def _drop(events: Events, parts: Sequence[set[int]], holds: Callable[[Events], bool]) -> Events:
    """``ddmin``: leave out as many ``parts``, sets of indices, as can be."""

    def without(dropped: Sequence[set[int]]) -> Events:
        gone = set().union(*dropped)
        return tuple(event for index, event in enumerate(events) if index not in gone)

    gone: list[set[int]] = []
    left = list(parts)
    size = len(left)
    while size:
        # From the end: what comes late hangs on what comes early.
        for start in reversed(range(0, len(left), size)):
            chunk = left[start : start + size]
            if chunk and holds(without(gone + chunk)):
                gone += chunk
                del left[start : start + size]
        size = min(size // 2, len(left))
    return without(gone)


def _simplify(
    events: Events,
    simpler: Callable[[Events], Iterator[Events]],
    holds: Callable[[Events], bool],
) -> Events:
    """Take the first of the ``simpler`` events that still fail, until none does."""
    while (found := next(filter(holds, simpler(events)), None)) is not None:
        events = found
    return events


def _merged_runs(events: Events) -> Iterator[Events]:
    for i, (first, second) in enumerate(itertools.pairwise(events)):
        if isinstance(first, Run) and isinstance(second, Run):
            yield (*events[:i], Run(first.max_steps + second.max_steps), *events[i + 2 :])


def _shorter_runs(events: Events) -> Iterator[Events]:
    for i, event in enumerate(events):
        if isinstance(event, Run):
            for steps in _smaller(event.max_steps):
                yield (*events[:i], Run(steps), *events[i + 1 :])


def _plainer_requests(events: Events) -> Iterator[Events]:
    for i, event in enumerate(events):
        if isinstance(event, Submit):
            for plainer in _plainer(event):
                yield (*events[:i], plainer, *events[i + 1 :])


def _plainer(event: Submit) -> Iterator[Submit]:
    """Defaults in place of values, all at once or one by one; fewer tokens."""
    given = {f.name: f.default for f in dataclasses.fields(Submit) if f.name != "arrival"}
    plain = {n: d for n, d in given.items() if d not in (dataclasses.MISSING, getattr(event, n))}
    if len(plain) > 1:
        yield dataclasses.replace(event, **plain)
    for name, default in plain.items():
        yield dataclasses.replace(event, **{name: default})
    for count in _smaller(event.max_new_tokens):
        output = event.output[:count]
        yield dataclasses.replace(event, max_new_tokens=count, output=output)
    for count in _smaller(len(event.prompt)):
        for prompt in (event.prompt[:count], event.prompt[-count:]):
            yield dataclasses.replace(event, prompt=prompt)


def _smaller(value: int) -> list[int]:
    """Numbers from 1 to below ``value`` that are worth a try, the smallest first."""
    return sorted({1, value // 2, value - 1} - {0, value}) if value > 1 else []


def to_test(trace: Trace, name: str = "test_replay") -> str:
    """Source of a pytest test that replays a trace without a model and checks the invariants."""
    trace = scripted(trace)
    kinds = sorted({type(event).__name__ for event in trace.events} | {"Trace"})
    events = "".join(_indented(f"{_literal(event)},", 8) for event in trace.events)
    secret = f"    secret={trace.secret},\n" if trace.secret else ""
    return (
        '"""A run that failed, cut down: replayed without a model."""\n\n'
        "from oxidize_jax.config import EngineConfig\n"
        "from oxidize_jax.engine.replay import replay_scheduler\n"
        f"from oxidize_jax.engine.trace import {', '.join(kinds)}\n\n"
        "TRACE = Trace(\n"
        f"{_indented(f'config={_literal(trace.config)},', 4)}"
        f"    vocab_size={trace.vocab_size},\n"
        f"{secret}"
        f"    events=(\n{events}    ),\n"
        ")\n\n\n"
        f"def {name}():\n"
        "    # Raises after the event or the step that breaks an invariant.\n"
        "    replay_scheduler(TRACE)\n"
    )


def _literal(value: Any) -> str:
    """Python source of events and configurations, without what is at its default."""
    if dataclasses.is_dataclass(value):
        fields = [
            f"{field.name}={_literal(item)}"
            for field in dataclasses.fields(value)
            if (item := getattr(value, field.name)) != field.default
        ]
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, tuple):
        items = ", ".join(map(_literal, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _indented(source: str, indent: int) -> str:
    """Lines of at most 100 characters; each break is inside of brackets."""
    lines = textwrap.wrap(
        source,
        width=100,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 4),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines) + "\n"
