"""How figures are worked out, apart from what they are of."""

from __future__ import annotations

import pytest

from oxidize_jax.bench import latency, report, scheduler
from oxidize_jax.bench.throughput import Run, medians
from oxidize_jax.compile_clock import joined


def test_tokens_that_are_read_together_share_their_time():
    events = [(0.5, 1), (0.7, 2), (1.0, 1)]
    assert latency.token_gaps(events) == pytest.approx([0.1, 0.1, 0.3])
    assert latency.mean_gap(events) == pytest.approx(0.5 / 3)
    assert latency.token_gaps(events[:1]) == []


def test_nested_and_repeated_intervals_count_once():
    assert joined([(5.0, 6.0), (1.0, 4.0), (2.0, 3.0), (3.5, 4.5)]) == pytest.approx(4.5)
    assert joined([]) == 0


def test_a_median_is_of_each_figure_by_itself():
    runs = [Run(seconds, 10, 20, 3, 0, 0, blocks) for seconds, blocks in ((2, 9), (4, 8), (5, 7))]
    middle = medians(runs)
    assert (middle["seconds"], middle["peak_blocks"]) == (4, 8)
    assert middle["output_tokens_per_second"] == 5
    assert middle["total_tokens_per_second"] == 7.5


def test_a_table_has_its_values_in_one_column():
    assert (
        report.table([("a", "1"), ("long name", "2"), ("", "")]) == "a          1\nlong name  2\n"
    )
    assert report.spread([0.5, 0.25], 10) == "median of 2 (2.50 to 5.00)"


def test_too_few_requests_to_admit_are_refused():
    config = scheduler.config_of(rows=2, blocks=64, requests=8, max_model_len=128)
    with pytest.raises(ValueError, match="max_num_requests=8: 130 are needed"):
        scheduler.measure(config, 1)


@pytest.mark.slow
def test_the_scheduler_is_timed_on_states_that_admit_as_they_should():
    config = scheduler.config_of(rows=8, blocks=256, requests=256, max_model_len=128)
    *medians, least = scheduler.measure(config, 1)
    assert min(medians) > 0
    assert least > 0
