"""Real long chains of thought segment without loss: all 1,062 transcripts, with the tokenizer of most of them."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from attnrl.algo.branching import candidates
from attnrl.algo.steps import blank_lines, lines, sentences
from attnrl.data.texts import TokenTexts
from attnrl.types import as_ids

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def tokenizer(real_data):
    return tokenizers.Tokenizer.from_file(str(real_data / "tokenizers/ds_r1_distill_qwen/tokenizer.json"))


@pytest.fixture(scope="module")
def transcripts(real_data):
    with gzip.open(real_data / "transcripts/reasoning_transcripts.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line)["response"] for line in file]


@pytest.fixture(scope="module")
def segmented(tokenizer, transcripts):
    """Per transcript its text, token ids, token texts and steps."""
    texts_of = TokenTexts(tokenizer)
    rows = []
    for text in transcripts:
        ids = as_ids(tokenizer.encode(text, add_special_tokens=False).ids)
        texts = texts_of(ids)
        rows.append((text, ids, texts, blank_lines(texts)))
    return rows


def test_all_are_there(segmented):
    assert len(segmented) == 1062


def test_joined_steps_equal_the_response(segmented, tokenizer):
    for text, ids, _, steps in segmented:
        parts = [tokenizer.decode(ids[s.start : s.stop].tolist(), skip_special_tokens=False) for s in steps]
        assert "".join(parts) == text


def test_spans_partition_the_tokens(segmented):
    for _, ids, _, steps in segmented:
        assert np.array_equal(np.concatenate([np.arange(s.start, s.stop) for s in steps]), np.arange(len(ids)))


def test_steps_are_the_paragraphs_of_the_text(segmented):
    """As many steps as the text, split at blank lines, has paragraphs, and the same ones, up to white space.

    A token may hold a blank line and the start of the next paragraph; none of these transcripts has one.
    """
    for text, _, texts, steps in segmented:
        separator = "\n\n" if "\n\n" in text else "\n"
        paragraphs = [p.strip() for p in text.split(separator) if p.strip()]
        found = ["".join(texts[s.start : s.stop]).strip() for s in steps]
        broken = "�" in "".join(found)  # a character of several tokens: compare the number only
        assert len(found) == len(paragraphs)
        assert broken or found == paragraphs


def test_no_step_is_white_space(segmented):
    for text, _, texts, steps in segmented:
        assert text.strip()
        assert all("".join(texts[s.start : s.stop]).strip() for s in steps)


def test_thinking_ends_at_the_mark(segmented):
    """192 transcripts, 140 of them of the 14B model, have no `</think>`; the others have answer steps from it on."""
    for text, _, texts, steps in segmented:
        answer = "".join(t for s in steps if not s.thinking for t in texts[s.start : s.stop])
        if "</think>" in text:
            assert answer.count("</think>") == text.count("</think>")
            thought = "".join(t for s in steps if s.thinking for t in texts[s.start : s.stop])
            assert "</think>" not in thought
        else:
            assert answer == ""
    without = sum("</think>" not in text for text, *_ in segmented)
    assert without == 192


def test_most_can_be_branched_twice(segmented):
    """Two branch points need three steps of thinking; short chains on grade-school problems have fewer."""
    enough = [len(candidates(steps)) >= 2 for *_, steps in segmented]
    long = [len(ids) >= 1000 for _, ids, *_ in segmented]
    assert sum(enough) == 908
    assert all(e for e, many in zip(enough, long, strict=True) if many)


@pytest.mark.parametrize("segmenter", [lines, sentences])
def test_finer_segmenters_partition_too(segmented, segmenter):
    for text, ids, texts, steps in segmented[::10]:
        finer = segmenter(texts)
        assert [finer[0].start, *(s.stop for s in finer)] == [0, *(s.start for s in finer[1:]), len(ids)]
        assert len(finer) >= len(steps)
        assert text
