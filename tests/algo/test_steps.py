"""Segmentation: steps partition the response, and end where the text says so (Sec. 3.1.1, step 1)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrl.algo.steps import SEGMENTERS, blank_lines, every_n_tokens, lines, sentences

PIECES = [
    "a",
    "b.",
    " ",
    "\n",
    "\n\n",
    ".\n\n",
    "\n\n\n",
    "\r\n",
    "",
    "x\n",
    "\n\ny",
    "</",
    "think",
    ">",
    "</think>",
    "?",
]
texts_of_tokens = st.lists(st.sampled_from(PIECES), min_size=1, max_size=40)


def spans(steps):
    return [(s.start, s.stop) for s in steps]


def words(texts, steps):
    return ["".join(texts[s.start : s.stop]) for s in steps]


class TestBlankLines:
    def test_step_ends_with_the_token_that_completes_the_blank_line(self):
        assert spans(blank_lines(["First", ".\n\n", "Second", " one", ".\n\n", "Third"])) == [(0, 2), (2, 5), (5, 6)]

    def test_two_line_break_tokens_in_a_row_are_a_blank_line(self):
        assert spans(blank_lines(["A", "\n", "\n", "B"])) == [(0, 3), (3, 4)]

    def test_blank_line_spread_over_the_ends_of_two_words(self):
        assert spans(blank_lines(["A\n", "\nB", "C"])) == [(0, 2), (2, 3)]

    def test_windows_line_breaks(self):
        assert spans(blank_lines(["A", "\r\n", "\r\n", "B"])) == [(0, 3), (3, 4)]

    def test_longer_runs_of_line_breaks_make_no_empty_step(self):
        texts = ["A", "\n\n", "\n\n", "\n\n", "B"]
        assert words(texts, blank_lines(texts)) == ["A\n\n", "\n\n\n\nB"]

    def test_leading_and_trailing_blank_lines_belong_to_the_steps_they_touch(self):
        texts = ["\n\n", "A", "\n\n", "B", "\n\n", "\n\n"]
        assert words(texts, blank_lines(texts)) == ["\n\nA\n\n", "B\n\n\n\n"]

    def test_single_line_breaks_do_not_cut_where_there_are_blank_lines(self):
        assert spans(blank_lines(["A", "\n", "B", "\n\n", "C"])) == [(0, 4), (4, 5)]

    def test_without_blank_line_it_cuts_at_line_breaks(self):
        assert spans(blank_lines(["A", "\n", "B", "C", "\n", "D"])) == [(0, 2), (2, 5), (5, 6)]

    def test_without_line_breaks_it_is_one_step(self):
        assert spans(blank_lines(["A", " B", " C"])) == [(0, 3)]

    @pytest.mark.parametrize("texts", [["\n\n"], [" ", "\n", "\n\n"], [""]])
    def test_white_space_alone_is_one_step(self, texts):
        assert spans(blank_lines(texts)) == [(0, len(texts))]

    def test_an_empty_response_has_no_steps(self):
        assert blank_lines([]) == ()

    def test_an_end_token_without_text_stays_with_the_last_step(self):
        assert spans(blank_lines(["A", "\n\n", "B", "\n\n", ""])) == [(0, 2), (2, 5)]


class TestThinking:
    def thinking(self, texts, segmenter=blank_lines):
        return [s.thinking for s in segmenter(texts)]

    def test_without_the_mark_everything_is_thinking(self):
        assert self.thinking(["A", "\n\n", "B"]) == [True, True]

    def test_the_step_that_holds_the_mark_and_all_after_it_are_not_thinking(self):
        assert self.thinking(["A", "\n\n", "B\n", "</think>", "\n\n", "C", "\n\n", "D"]) == [True, False, False, False]

    def test_a_step_that_ends_right_before_the_mark_is_thinking(self):
        assert self.thinking(["A", "\n\n", "</think>", "\n\n", "B"]) == [True, False, False]

    def test_the_mark_may_be_several_tokens(self):
        assert self.thinking(["A", "\n\n", "B ", "</", "think", ">", "\n\n", "C"]) == [True, False, False]

    def test_a_mark_cut_in_two_by_the_segmenter_counts_where_it_begins(self):
        texts = ["a", "</", "think", ">", "b"]
        assert self.thinking(texts, lambda t: every_n_tokens(t, tokens=2)) == [False, False, False]

    def test_the_first_mark_counts(self):
        assert self.thinking(["A", "</think>", "\n\n", "B", "\n\n", "</think>"]) == [False, False, False]


def test_lines():
    assert spans(lines(["A", "\n\n", "B", "\n", "C"])) == [(0, 2), (2, 4), (4, 5)]


def test_sentences():
    texts = ["He", " paid", " 3", ".", "5", "!", " Really", "?", ')"', " Yes", "\n", "So"]
    assert words(texts, sentences(texts)) == ["He paid 3.5!", ' Really?)"', " Yes\n", "So"]


def test_every_n_tokens():
    assert spans(every_n_tokens(list("abcde"), tokens=2)) == [(0, 2), (2, 4), (4, 5)]
    assert spans(every_n_tokens(list("abcd"), tokens=2)) == [(0, 2), (2, 4)]


@given(texts=texts_of_tokens, name=st.sampled_from(sorted(SEGMENTERS)), n=st.integers(1, 5))
def test_spans_partition_the_response(texts, name, n):
    segmenter = SEGMENTERS[name]
    steps = segmenter(texts, tokens=n) if name == "every_n_tokens" else segmenter(texts)
    covered = [t for s in steps for t in range(s.start, s.stop)]
    assert covered == list(range(len(texts)))
    assert all(s.tokens > 0 for s in steps)


@given(texts=texts_of_tokens, name=st.sampled_from(["blank_lines", "lines", "sentences"]))
def test_no_step_is_white_space_unless_the_response_is(texts, name):
    steps = SEGMENTERS[name](texts)
    if "".join(texts).strip():
        assert all(w.strip() for w in words(texts, steps))
    else:
        assert len(steps) == 1


def naive_blank_lines(texts):
    """Character by character: note the token in which each pair of line breaks ends, then drop white-space steps."""
    owner = [i for i, t in enumerate(texts) for _ in t]
    text = "".join(texts)
    pattern = "\n\n" if re.search("\n\r?\n", text) else "\n"
    ends, seen = [], ""
    for i, character in enumerate(text):
        seen += "" if character == "\r" else character
        if seen.endswith(pattern):
            ends.append(owner[i] + 1)
            seen = ""
    steps, start = [], 0
    for stop in [*ends, len(texts)]:
        if "".join(texts[start:stop]).strip():
            steps.append([start, stop])
            start = stop
    if not steps:
        return [(0, len(texts))]
    steps[-1][1] = len(texts)
    return [tuple(s) for s in steps]


@given(texts=st.lists(st.sampled_from([p for p in PIECES if "\r" not in p]), min_size=1, max_size=40))
def test_blank_lines_equal_a_naive_scan(texts):
    assert spans(blank_lines(texts)) == naive_blank_lines(texts)


@given(texts=texts_of_tokens, name=st.sampled_from(sorted(SEGMENTERS)))
def test_thinking_ends_with_the_first_mark(texts, name):
    """A step is thinking exactly if all of it lies before the first `</think>`."""
    text = "".join(texts)
    mark = text.find("</think>")
    for s in SEGMENTERS[name](texts):
        stop = len("".join(texts[: s.stop]))
        assert s.thinking == (mark < 0 or stop <= mark)
