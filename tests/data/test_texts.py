"""Texts of single tokens: special tokens are white space, think marks are text; with real tokenizers."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

import pytest
from transformers import AddedToken, AutoTokenizer

from attnrl.algo.steps import blank_lines, every_n_tokens, lines, sentences
from attnrl.data.texts import TokenTexts
from attnrl.local.models import load_tokenizer
from attnrl.types import as_ids

DEMO = Path(str(resources.files("attnrl"))) / "assets" / "demo_model"


@pytest.fixture(scope="module")
def distill():
    if "ATTNRL_DATA" not in os.environ:
        pytest.skip("ATTNRL_DATA is not set: the real tokenizer is not here")
    return AutoTokenizer.from_pretrained(Path(os.environ["ATTNRL_DATA"]) / "tokenizers/ds_r1_distill_qwen")


def steps_of(tokenizer, text: str, segmenter=blank_lines, end: int = 1):
    ids = as_ids(tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] * end)
    return ids, segmenter(TokenTexts(tokenizer)(ids))


@pytest.mark.parametrize("segmenter", [blank_lines, lines, sentences])
@pytest.mark.parametrize("end", [0, 1, 3])
def test_an_end_token_after_the_last_break_is_no_step(distill, segmenter, end) -> None:
    ids, steps = steps_of(distill, "First this.\n\nThen that.\n\n", segmenter, end)
    assert len(steps) == 2
    assert steps[-1].stop == len(ids)


def test_end_tokens_of_the_demo_s_model_are_no_step() -> None:
    tokenizer = load_tokenizer(DEMO)
    ids, steps = steps_of(tokenizer, "Take maps = 1\n\nThen stones = maps * 7 = 1 * 7 = 7\n\n")
    assert [(s.start, s.stop) for s in steps] == [(0, 5), (5, len(ids))]
    assert TokenTexts(tokenizer)(ids)[-1] == ""
    assert tokenizer.decode([int(ids[-1])]) == "<eos>"


def test_the_think_mark_is_text_even_where_the_tokenizer_calls_it_special(distill) -> None:
    text = "So 4.\n\nWait.\n</think>\n\nIt is 4."
    for special in (False, True):
        if special:
            distill.add_special_tokens({"additional_special_tokens": [AddedToken("</think>", special=True)]})
            assert distill.added_tokens_decoder[distill.convert_tokens_to_ids("</think>")].special
        ids, steps = steps_of(distill, text)
        assert len(distill.encode("</think>", add_special_tokens=False)) == 1
        assert [s.thinking for s in steps] == [True, False, False]
        assert steps[-1].stop == len(ids)
        texts = TokenTexts(distill)(ids)
        assert "".join(texts) == text


def test_fixed_lengths_still_count_special_tokens(distill) -> None:
    ids, steps = steps_of(distill, "a b c d", lambda texts: every_n_tokens(texts, tokens=2))
    assert sum(s.tokens for s in steps) == len(ids) == 5
