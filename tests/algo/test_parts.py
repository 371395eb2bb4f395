"""From a name in a config to a part with its options bound."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from attnrl.algo.adaptive import BUDGETS, FILTERS
from attnrl.algo.advantages import ESTIMATORS
from attnrl.algo.branching import RULES
from attnrl.algo.parts import bind, find
from attnrl.algo.steps import SEGMENTERS
from attnrl.config import check_options


def test_ours_by_name_with_knobs_and_options(build):
    trunk = build.trunk(30, 1.0, starts=(5, 10, 15, 20, 25), fci=[0, 3, 1, 2, 5, 4])
    rule = bind(RULES, "fci", {"top_fraction": 1.0}, {"points": 3, "width": 2})
    assert rule(build.prompt(), trunk, np.random.default_rng(0)) == (5, 10, 15)


def test_an_option_wins_over_a_knob():
    cut = bind(SEGMENTERS, "every_n_tokens", {"tokens": 2}, {"tokens": 3})
    assert [s.tokens for s in cut(list("abcd"))] == [2, 2]


def test_a_knob_the_part_does_not_have_is_not_offered():
    assert bind(BUDGETS, "all", {}, {"rounding": "ceil"})(1.0, 6) == 6
    assert bind(BUDGETS, "difficulty", {}, {"rounding": "ceil"})(1.0, 6) == 3


def test_an_unknown_option_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'fci' has no option 'pionts'; did you mean 'points'\?; it has: points"):
        bind(RULES, "fci", {"pionts": 2}, {})


def test_positional_parameters_are_no_options():
    with pytest.raises(ValueError, match=r"no option 'accuracy'; it has: none"):
        bind(BUDGETS, "all", {"accuracy": 1.0}, {})


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'fcl'; did you mean 'fci'\?; known: fci, surp.*package.module:function"):
        find(RULES, "fcl")


def test_own_parts_by_module_and_function():
    assert find({}, "math:sqrt")(9.0) == 3.0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module:rule", "no_such_module"),
        ("math:no_such", "no_such"),
        ("math:pi", "not a function"),
        (":f", ":f"),
    ],
)
def test_what_cannot_be_found_is_said(name, why):
    with pytest.raises(ValueError, match=why):
        find({}, name)


@pytest.mark.parametrize("table", [RULES, SEGMENTERS, ESTIMATORS, BUDGETS])
def test_every_option_of_ours_has_a_default(table):
    """So that a name alone is enough."""
    for part in table.values():
        for parameter in inspect.signature(part).parameters.values():
            assert parameter.kind is not parameter.KEYWORD_ONLY or parameter.default is not parameter.empty


@pytest.mark.parametrize("table", [RULES, SEGMENTERS, ESTIMATORS, BUDGETS, FILTERS])
def test_a_default_that_is_written_down_is_accepted(table):
    """A user may put what the docs call the default into a config; None, which TOML does not know, aside."""
    written = 0
    for part in table.values():
        parameters = inspect.signature(part).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not None}
        check_options(part, defaults)
        written += len(defaults)
    assert written


def test_a_name_of_one_s_own_written_otherwise_is_said_as_it_is_written(tmp_path, monkeypatch):
    (tmp_path / "parts_of_mine.py").write_text("def okay(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, said in (
        ("parts_of_mine.py:okay", "names a file; write its module, parts_of_mine:okay"),
        ("./deep/mine.py:okay", "write its module, deep.mine:okay"),
        ("parts_of_mine.okay", "for your own write parts_of_mine:okay"),
        ("parts_of_mine:oky", "parts_of_mine has no 'oky'; did you mean 'okay'?"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            find({"fci": max}, name)
    assert find({}, "parts_of_mine:okay").__name__ == "okay"
