"""Random use of the scheduler against a model written apart from it, state by state.

Hypothesis chooses the events: submissions, forks, aborts, resets of the prefix cache, and
steps with the tokens they sample. After every one of them all that can be told of the state
must be what the model says, down to the block ids, and the invariants must hold. At the end
of each example the engine must come to rest without new events, with no block held.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)
from run_machine import (
    BLOCKS,
    CONFIGS,
    MAX_CHILDREN,
    WORDS,
    Abort,
    Fork,
    Reset,
    Resume,
    Step,
    Submit,
    Twin,
    Violation,
    continuation,
    free_slots,
    happened,
    submit_all,
)

from oxidize_jax.scheduler.state import NEVER

DRAWS = st.integers(0, WORDS**6 - 1)
PROMPTS = st.builds(
    lambda blocks, cut: sum(blocks, ())[: max(0, 4 * len(blocks) - cut)],
    st.lists(st.sampled_from(BLOCKS), max_size=5),
    st.sampled_from((0, 0, 1, 3)),
)
"""0 to 20 tokens."""
OPTIONS = st.builds(
    Submit,
    slot=st.just(-1),
    prompt=st.just(()),
    max_tokens=st.sampled_from((1, 2, 3, 5, 8, 30)),
    min_tokens=st.sampled_from((0, 0, 2)),
    priority=st.sampled_from((0, 0, -1, 1)),
    salt=st.sampled_from((0, 0, 0, 1)),
    use_cache=st.sampled_from((True, True, True, False)),
    stops=st.booleans(),
    pause_after=st.sampled_from((NEVER, NEVER, NEVER, 0, 1, 2)),
)


class SchedulerMachine(RuleBasedStateMachine):
    config_name: ClassVar[str]
    seen: ClassVar[Counter[str]]
    """What all examples together have met."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = Twin(CONFIGS[self.config_name])
        self.broken = False

    def apply(self, *events) -> None:
        for event in events:
            try:
                self.twin.apply(event)
            except Violation:
                self.broken = True
                raise

    def teardown(self) -> None:
        if not self.broken:
            self.twin.finish()
            type(self).seen += happened(self.twin)

    @property
    def requests(self):
        return [request for request in self.twin.model.slots if request is not None]

    def some_slots(self, count, shift):
        """Free slots, as many of ``count`` as there are, from different places."""
        free = free_slots(self.twin)
        return [*free[shift % len(free) :], *free[: shift % len(free)]][:count]

    @rule(draw=DRAWS)
    def step(self, draw) -> None:
        self.apply(Step(draw))

    @rule(draw=DRAWS, count=st.integers(2, 4))
    def steps(self, draw, count) -> None:
        self.apply(*(Step(draw * i) for i in range(1, count + 1)))

    @precondition(lambda self: free_slots(self.twin))
    @rule(
        prompt=PROMPTS,
        options=OPTIONS,
        count=st.sampled_from((1, 1, 2, 3, 4)),
        forks=st.booleans(),
        shift=st.integers(0, 7),
    )
    def submit(self, prompt, options, count, forks, shift) -> None:
        event = dataclasses.replace(options, prompt=prompt)
        self.apply(*submit_all(event, self.some_slots(count, shift), forks))

    @precondition(lambda self: free_slots(self.twin) and self.requests)
    @rule(which=st.integers(0, 7), part=st.integers(0, 23), options=OPTIONS)
    def submit_again(self, which, part, options) -> None:
        """What another request has said so far, or the beginning of it."""
        tokens = self.requests[which % len(self.requests)].tokens
        prompt = tuple(tokens[: len(tokens) - part % len(tokens)])
        (slot,) = self.some_slots(1, which)
        self.apply(dataclasses.replace(options, slot=slot, prompt=prompt))

    @precondition(lambda self: free_slots(self.twin) and self.requests)
    @rule(which=st.integers(0, 7))
    def submit_continuation(self, which) -> None:
        """One more continuation of the prompt of a request, which may be anywhere by now."""
        parent = self.requests[which % len(self.requests)]
        (slot,) = self.some_slots(1, which)
        if slot != parent.slot:
            self.apply(continuation(slot, parent))

    @rule(
        parent=st.integers(0, 7),
        children=st.lists(st.integers(0, 7), min_size=1, max_size=MAX_CHILDREN, unique=True),
        tokens=st.lists(
            st.sampled_from((None, None, 0, 1, 2)), min_size=MAX_CHILDREN, max_size=MAX_CHILDREN
        ),
        any_slot=st.sampled_from((False, False, False, True)),
    )
    def fork(self, parent, children, tokens, any_slot) -> None:
        """Children of a request as it stands, into free slots or some that may be in use."""
        slots = range(self.twin.config.max_num_requests)
        if not any_slot:
            slots = free_slots(self.twin)
            parents = [r.slot for r in self.requests if r.alive]
            parent = parents[parent % len(parents)] if parents else 0
        children = tuple(slots[child] for child in children if child < len(slots))
        parent %= self.twin.config.max_num_requests
        self.apply(Fork(parent, children, tuple(tokens[: len(children)])))

    @rule(slot=st.integers(0, 7))
    def abort(self, slot) -> None:
        self.apply(Abort(slot % self.twin.config.max_num_requests))

    @precondition(lambda self: self.requests)
    @rule(
        which=st.lists(st.integers(0, 7), min_size=1, max_size=MAX_CHILDREN, unique=True),
        more=st.lists(st.sampled_from((1, 1, 2, 0)), min_size=MAX_CHILDREN, max_size=MAX_CHILDREN),
    )
    def resume(self, which, more) -> None:
        """Paused requests go on for some tokens, and where none is, others are paused."""
        paused = [r.slot for r in self.requests if r.paused] or [r.slot for r in self.requests]
        slots = tuple(dict.fromkeys(paused[i % len(paused)] for i in which))
        self.apply(Resume(slots, tuple(more[: len(slots)])))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.apply(Reset())


def run_machine(name: str, examples: int, start: int) -> Counter[str]:
    """Run ``examples`` of the machine that follow from the seed ``start``."""
    fields = {"config_name": name, "seen": Counter()}
    machine = seed(start)(type("Machine", (SchedulerMachine,), fields))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine.seen


def run_varied(name: str, examples: int, start: int) -> None:
    """Examples that meet all that the machine is for, with further seeds where some do not:
    Hypothesis draws by what modules other tests have imported, too."""
    seen: Counter[str] = Counter()
    for turn in range(4):
        seen += run_machine(name, examples, start + 10 * turn)
        if not (missed := missing(name, seen)):
            return
    raise AssertionError(f"never met: {missed} among {seen}")


def missing(name: str, seen: Counter[str]) -> list[str]:
    """What the examples should have met and have not."""
    kinds = ("submit", "abort", "fork", "resume", "step", "reset")
    wanted = [f"event {kind}" for kind in kinds]
    wanted += ["prompts refused", "forks refused", "forks placed", "preemptions", "copies"]
    wanted += [f"finished: {reason}" for reason in ("stop", "length", "abort")]
    config = CONFIGS[name]
    if config.max_model_len > config.num_blocks * config.block_size:
        wanted += ["finished: pool too small"]
    if config.enable_prefix_caching:
        wanted += ["admissions with hits", "admissions with all tokens hit"]
    return [kind for kind in wanted if not seen[kind]]


@pytest.mark.parametrize("name", CONFIGS)
def test_scheduler_agrees_with_the_model_in_random_use(name):
    run_varied(name, 100, start=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_scheduler_agrees_with_the_model_in_long_random_use(name):
    run_varied(name, 300, start=1)
