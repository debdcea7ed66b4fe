"""The line on the host: by priority, then arrival; aborts and other threads at any moment."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oxidize_jax.engine import host_queue
from oxidize_jax.engine.host_queue import HostQueue
from tests.tools.host_engine import request


def put(queue, priority=0):
    return queue.push(request([1], 1, priority=priority), None)


def line(queue):
    return [entry.request_id for entry in iter(queue.pop, None)]


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=20))
def test_the_first_of_the_least_priority_comes_first_and_the_aborted_never(entries):
    queue = HostQueue()
    ids = [put(queue, priority) for priority, _ in entries]
    for request_id, (_, aborted) in zip(ids, entries, strict=True):
        if aborted:
            queue.end(request_id)
    expected = [
        request_id
        for request_id, (_, aborted) in sorted(
            zip(ids, entries, strict=True), key=lambda item: (item[1][0], item[0])
        )
        if not aborted
    ]
    assert queue.is_empty == (not expected)
    assert queue.num_unfinished == len(expected)
    assert line(queue) == expected
    assert queue.is_empty
    assert queue.num_unfinished == len(expected)


def test_who_jumps_the_line_while_it_is_read_is_not_lost(monkeypatch):
    """Another thread adds a request of less priority value just before the head is taken."""
    queue = HostQueue()
    gone, late = put(queue), []

    def pop(heap, take=heapq.heappop):
        if not late:
            late.append(put(queue, priority=-1))
        return take(heap)

    queue.end(gone)
    monkeypatch.setattr(host_queue.heapq, "heappop", pop)
    assert line(queue) == late


def test_only_those_in_line_are_left_when_a_step_has_failed():
    queue = HostQueue()
    running, waiting, aborted = put(queue), put(queue), put(queue)
    assert queue.pop().request_id == running
    queue.end(aborted)
    queue.forget_others()
    assert [request_id in queue for request_id in (running, waiting, aborted)] == [0, 1, 0]
    assert line(queue) == [waiting]


def test_a_request_that_could_not_be_queued_has_no_id_that_counts(monkeypatch):
    queue = HostQueue()

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(host_queue.heapq, "heappush", fail)
    with pytest.raises(MemoryError):
        put(queue)
    assert queue.num_unfinished == 0
