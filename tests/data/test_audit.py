"""Duplicates, leaks and contamination: hand-made cases, then the real sets with their listed rows."""

import json
import os
import re
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrl.config import load_config
from attnrl.data.audit import clean, contamination, decontaminate, duplicates, leaks, problem_key
from attnrl.data.benchmarks import load_benchmark
from attnrl.data.records import Record, Records, load_records


def records(*pairs: tuple[str, str]) -> list[Record]:
    return [Record(problem, (answer,), "f", f"f:{row}") for row, (problem, answer) in enumerate(pairs, start=1)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"Let $x^{2}+a x=0$.", r"Let \( x^2 + ax = 0 \)"),
        (r"Find $\dfrac{1}{2}$, please", "find\n\\[\\frac{1}{2}\\]\nplease."),
        (r"$\left( a \right) \leqslant b$", r"$(a) \leq b$"),
        (r"Sum $1, \ldots, 9$", "Sum $1, \\cdots,9$"),
        (r"Ann’s “box”", "Ann's \"box\""),
    ],
)  # fmt: skip
def test_spelling_does_not_change_the_key(one, other):
    assert problem_key(one) == problem_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find 2.5", "Find 25"),
        ("x+1", "x-1"),
        (r"\frac{12}{3}", r"\frac{1}{23}"),
        ("(a+b)c", "a+bc"),
        ("x<1", "x>1"),
        ("x_1", "x^1"),
    ],
)
def test_meaning_changes_the_key(one, other):
    assert problem_key(one) != problem_key(other)


@given(st.text(alphabet="abx12+-=(){}\\$ .,\n", max_size=60))
def test_the_key_ignores_spacing_and_case(text):
    assert problem_key(text) == problem_key(f"  {text.upper().lower()}\n")
    assert not re.search(r"\s", problem_key(text))


def test_duplicates_and_their_answers():
    groups = duplicates(
        records(("1+1?", "2"), ("$1 + 1$ ?", "3"), ("2+2?", "4"), ("a?", r"\frac{1}{2}"), ("a ?", r"\dfrac 12"))
    )
    assert [[r.row for r in group.records] for group in groups] == [[1, 2], [4, 5]]
    assert [group.conflicting for group in groups] == [True, True]
    assert [group.disagree() for group in groups] == [True, False]
    assert groups[0].answers == ("2", "3")
    assert not groups[0].disagree(same=lambda a, b: True)


def test_answers_that_stand_in_the_problem():
    rows = records((r"The sum is $\boxed{5}$.", "5"), (r"Press $\boxed{5}$.", "6"), ("No box 5", "5"))
    assert [r.row for r in leaks(rows)] == [1]


LONG = "In the garden of the old castle every one of the rows holds {n} apple trees, the gardener counts {m} rows."


def test_kinds_of_overlap():
    bench = records((LONG.format(n=7, m=8), "56"), ("2+2?", "4"))
    rows = records(
        (LONG.format(n=7, m=8).replace("castle", "mill").upper(), "56"),  # reworded a little, same numbers and answer
        (LONG.format(n=7, m=9), "63"),  # other number: near
        ("$2 + 2$?", "four"),  # short: equal key
        ("In the garden of the old castle there are cats.", "56"),  # only a phrase
        ("2+3?", "5"),
    )
    found = {o.record.row: (o.kind, o.benchmark.row, o.same_answer) for o in contamination(rows, bench)}
    assert found == {1: ("repeat", 1, True), 2: ("near", 1, False), 3: ("repeat", 2, False)}
    assert contamination(rows, []) == []


def test_clean_counts_every_row_once():
    rows = records(
        ("2+2?", "4"),
        ("3+3?", "6"),
        ("3 + 3?", "6"),
        ("4+4?", "8"),
        ("4+4 ?", "9"),
        (r"is $\boxed{1}$", "1"),
        ("5?", "5"),
    )
    without = decontaminate(rows, records(("$2+2$?", "4")))
    assert [r.row for r in without.records] == [2, 3, 4, 5, 6, 7]
    assert [(o.record.row, o.kind) for o in without.overlaps] == [(1, "repeat")]
    assert without.report() == "decontaminated: 6 of 7 problems remain; 1 are a benchmark's, 0 nearly so"
    cleaned = clean(without.records)
    assert [r.row for r in cleaned.records] == [2, 7]
    assert (cleaned.leaked, cleaned.conflicting, cleaned.repeated) == (1, 2, 1)
    assert [r.row for r in clean(rows).records] == [1, 2, 7]  # two switches: a benchmark's problem may stay
    assert cleaned.report() == (
        "cleaned: 2 of 6 problems remain; 1 state their answer, 2 have conflicting answers, 1 repeat another"
    )


@pytest.fixture(scope="module")
def data_dir() -> Path:
    if "ATTNRL_DATA" not in os.environ:
        pytest.skip("ATTNRL_DATA is not set: the real data files are not here")
    return Path(os.environ["ATTNRL_DATA"])


@pytest.fixture(scope="module")
def deepscaler(data_dir) -> Records:
    return load_records(data_dir / "train/deepscaler_train.parquet")


@pytest.fixture(scope="module")
def benchmarks(data_dir) -> list[Record]:
    return [record for name in load_config("").evaluation.benchmarks for record in load_benchmark(name, data_dir)]


def test_deepscaler_duplicates(deepscaler):
    groups = duplicates(deepscaler)
    # the manifest of these files counts 1,356 further copies and 191 conflicting groups, under a key that still tells
    # x^{2} from x^2 and \( from $: ours finds these and more
    assert (len(groups), sum(len(group.records) - 1 for group in groups)) == (1130, 1507)
    assert sum(group.conflicting for group in groups) == 221
    ours = {record.row: number for number, group in enumerate(groups) for record in group.records}
    plain = defaultdict(list)
    for record in deepscaler:
        plain[re.sub(r"[\s$]", "", record.problem)].append(record.row)
    coarse = [rows for rows in plain.values() if len(rows) > 1]
    assert sum(len(rows) - 1 for rows in coarse) == 1343
    for rows in coarse:
        assert len({ours[row] for row in rows}) == 1
    assert {22678, 28354} <= {r.row for group in groups if group.disagree() for r in group.records}


def test_deepscaler_contamination(data_dir, deepscaler, benchmarks):
    listed = json.loads((data_dir / "train/contaminated_rows.json").read_text())["deepscaler"]
    # the list counts rows from 0
    found = {overlap.record.row - 1: overlap for overlap in contamination(deepscaler, benchmarks)}
    assert len(listed) == 23
    assert set(listed) <= set(found)
    # read one by one: each of these is the benchmark problem itself
    repeats = [
        3004, 3918, 3977, 5788, 6186, 6190, 6191, 6205, 6241, 6248, 6266, 6267, 6288, 6320, 6332, 6374, 6400,
        6417, 6593, 6718, 6976, 7141, 7160, 7202, 11643, 37418, 39703,
    ]  # fmt: skip
    assert [row for row, overlap in found.items() if overlap.kind == "repeat"] == repeats
    assert len(found) == 49
    assert found[38414].kind == "near"  # divided by 8, the benchmark by 9
    assert 35463 not in found  # a common phrase with another word in it


def test_deepscaler_after_both_switches(deepscaler, benchmarks):
    """The numbers in the header of preset attnrl_1p5b."""
    without = decontaminate(deepscaler, benchmarks)
    cleaned = clean(without.records)
    assert (deepscaler.rows, len(deepscaler), len(without.overlaps)) == (40_315, 40_309, 49)
    assert (cleaned.leaked, cleaned.conflicting, cleaned.repeated) == (20, 652, 1_053)  # 1,725
    assert len(cleaned.records) == 38_535


def test_deepscaler_leaks(deepscaler):
    rows = [record.row - 1 for record in leaks(deepscaler)]
    assert len(rows) == 20
    assert {16595, 16955, 22102} <= set(rows)
    assert 18119 not in rows  # there the box shows a wrong answer
    assert 712 not in rows  # there the box is notation


def test_math_and_gsm8k_contamination(data_dir, benchmarks):
    listed = json.loads((data_dir / "train/contaminated_rows.json").read_text())["math_part(of dapo+math)"]
    math = load_records(data_dir / "train/math_train_7500_with_solutions.parquet")
    found = {overlap.record.row - 1: overlap for overlap in contamination(math, benchmarks)}
    assert set(listed) <= set(found)
    assert len(found) == 32
    assert sum(overlap.kind == "repeat" for overlap in found.values()) == 7
    gsm8k = load_records(data_dir / "train/gsm8k_train.jsonl.gz")
    assert contamination(gsm8k, benchmarks) == []
    assert [o.kind for o in contamination(gsm8k, load_benchmark("gsm8k", data_dir))] == ["near", "near"]
