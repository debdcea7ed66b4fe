"""Stop strings: the text before the first match, whatever the chunks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oxidize_jax.text.stop import StopStrings


def stream(chunks, stops):
    found = StopStrings(stops)
    shown = "".join(found.add(chunk) for chunk in chunks) + found.finish()
    return shown, found.matched


@pytest.mark.parametrize(
    ("chunks", "stops", "shown", "matched"),
    [
        (["a", "b,", "c d"], ["b,c"], "a", "b,c"),
        (["a", "b,", "c d"], [",c"], "ab", ",c"),
        (["a", "b,", "c d"], ["c"], "ab,", "c"),
        (["a", "b,", "c d"], ["x" * 200], "ab,c d", None),
        (["Alice! x"], ["\n", "Alice:"], "Alice! x", None),
        (["ab", "ab", "c"], ["abc"], "ab", "abc"),
    ],
)
def test_tx01_tx02_matches_need_not_end_on_a_token(chunks, stops, shown, matched):
    assert stream(chunks, stops) == (shown, matched)


def test_text_that_may_begin_a_stop_is_held_back_and_then_shown_once():
    stops = StopStrings(["Alice:"])
    assert [stops.add(part) for part in ("Al", "ice", "! x")] == ["", "", "Alice! x"]
    assert stops.finish() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty string"):
        StopStrings(["a", ""])


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30)),
)
def test_any_chunking_gives_the_text_before_the_first_match(text, stops, cuts):
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(edges)]
    # The first match is the one whose last character comes first: it is seen first.
    ends = [(i + len(s), i) for s in stops if (i := text.find(s)) >= 0]
    shown, matched = stream(chunks, stops)
    if not ends:
        assert (shown, matched) == (text, None)
        return
    assert matched in stops
    assert text.startswith(shown + matched)
    assert len(shown) in {text.find(s) for s in stops}
    one_by_one, _ = stream(list(text), stops)
    assert one_by_one == text[: min(ends)[1]]
