"""Stored responses, graded without a model, through the command line."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from attnrl import cli
from attnrl.config import load_config
from attnrl.data.benchmarks import load_benchmark
from attnrl.data.records import Record
from attnrl.errors import DataError
from attnrl.evaluation import grade_stored
from attnrl.types import Verdict
from attnrl.verify import Verifier

_spec = importlib.util.spec_from_file_location("evaluation_fake", Path(__file__).parent / "fake.py")
fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def grade(path, load=lambda name: pytest.fail("no benchmark was needed"), **options):
    with Verifier(workers=1) as verifier:
        return grade_stored(path, lambda attempts: fake.grade(attempts, verifier, **options), load)


def test_rows_of_one_problem_are_its_samples(tmp_path) -> None:
    rows = [
        {"problem": "1+1?", "gold": "2", "response": r"\boxed{2}", "tokens": 5},
        {"problem": "2+2?", "gold": ["4", "four"], "response": r"\boxed{5}", "tokens": 7},
        {"problem": "1+1?", "gold": "2", "response": r"\boxed{3}", "tokens": 9},
        {"problem": "2+2?", "gold": ["4", "four"], "response": r"\boxed{\text{four}}", "finish": "length"},
    ]
    responses = grade(tmp_path / write(tmp_path / "mine.jsonl", rows).rpartition("/")[2])
    assert [(r.benchmark, r.row, r.sample, r.reward) for r in responses] == [
        ("mine", 1, 0, 1.0),
        ("mine", 2, 0, 0.0),
        ("mine", 1, 1, 0.0),
        ("mine", 2, 1, 0.0),
    ]
    assert responses[3].rule == "truncated"
    assert grade(tmp_path / "mine.jsonl", grade_truncated=True)[3].reward == 1.0


def test_other_columns_and_whole_numbers_reach_the_reward(tmp_path) -> None:
    rows = [{"response": "x", "gold": 2, "level": 3, "tests": ["a"], "finish": "length", "tokens": 9, "reward": 1.0}]
    write(tmp_path / "r.jsonl", rows)
    seen = []
    grade_stored(tmp_path / "r.jsonl", lambda attempts: seen.extend(attempts) or [Verdict(0.0, "x")], None)
    (attempt,) = seen
    assert (attempt.answers, attempt.finish, attempt.tokens) == (("2",), "length", 9)
    assert attempt.row == {"level": 3, "tests": ["a"]}


def test_without_gold_the_benchmark_says_it(tmp_path) -> None:
    records = [Record("What is\n 6 x 7?", ("42",), "s", "s:0"), Record("What is 1?", ("1",), "s", "s:1")]
    rows = [
        {"benchmark": "aime24", "row": 2, "response": r"\boxed{1}"},
        {"benchmark": "aime24", "problem": "What is 6 x 7?", "responses": [r"\boxed{42}", r"\boxed{41}"]},
    ]
    write(tmp_path / "r.jsonl", rows)
    responses = grade(tmp_path / "r.jsonl", lambda name: records)
    assert [(r.row, r.sample, r.gold, r.reward) for r in responses] == [
        (2, 0, ("1",), 1.0),
        (1, 0, ("42",), 1.0),
        (1, 1, ("42",), 0.0),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"gold": "2"}, "no text in the column response"),
        ({"response": "x"}, "no gold, and 'r' is no known benchmark"),
        ({"response": "x", "gold": " "}, "gold is empty"),
        ({"response": "x", "gold": [None]}, "gold is empty"),
        ({"response": "x", "gold": "2", "finish": "eos"}, "finish is 'eos'"),
        ({"response": "x", "benchmark": "aime24", "row": 9}, "aime24 has rows 1 to 1"),
        ({"response": "x", "benchmark": "aime24", "row": 0}, "rows are whole numbers, counted from 1"),
        ({"response": "x", "gold": "2", "row": "first"}, "rows are whole numbers, counted from 1"),
        ({"response": "x", "benchmark": "aime24", "problem": "other"}, "is not in aime24"),
        ({"response": "x", "problem": "p", "gold": "3"}, "differs from"),
    ],
)
def test_wrong_rows_are_named(tmp_path, row, message) -> None:
    write(tmp_path / "r.jsonl", [{"response": r"\boxed{2}", "problem": "p", "gold": "2"}, row])
    with pytest.raises(DataError, match=rf"r\.jsonl:2: .*{message}"):
        grade(tmp_path / "r.jsonl", lambda name: [Record("q", ("1",), "s", "s:0")])


def test_the_command_grades_compares_and_regrades_its_own_output(tmp_path, capsys) -> None:
    for name, wrong in (("a", 3), ("b", 1)):
        rows = [
            {"problem": f"{i}+0?", "gold": str(i), "response": rf"\boxed{{{i + (i < wrong)}}}"} for i in range(8)
        ]  # the first `wrong` answers are wrong
        file = write(tmp_path / f"{name}.jsonl", [row | {"benchmark": "sums"} for row in rows])
        assert cli.run(["eval", "--responses", file, "--output", str(tmp_path / name)]) == 0
    assert "62.5 [" in capsys.readouterr().out
    rows = pq.read_table(tmp_path / "a" / "problems.parquet").to_pylist()
    assert [row["right"] for row in rows] == [0, 0, 0, 1, 1, 1, 1, 1]
    code = cli.run(["eval", "--compare", f"{tmp_path}/a,{tmp_path}/b", "--output", str(tmp_path / "c")])
    assert code == 0
    assert "+25.0 [" in capsys.readouterr().out
    (comparison,) = json.loads((tmp_path / "c" / "comparison.json").read_text())["comparisons"]
    assert comparison["difference"] == pytest.approx(0.25)


def test_the_command_explains_mistakes(tmp_path, capsys) -> None:
    file = write(tmp_path / "r.jsonl", [{"response": r"\boxed{2}", "problem": "p", "gold": "2"}])
    for argv, message in (
        ([], "exactly one of --model, --responses and --compare"),
        (["--responses", str(tmp_path / "no.jsonl")], "no such file"),
        (["--responses", file, "--k", "1,8"], "pass@8 cannot be estimated: benchmark r has a problem with only 1"),
        (["--model", "m"], "--output DIR is needed"),
        (["--model", "demo", "--output", "o", "--samples", "4", "--k", "8"], "raise samples to at least 8"),
        (["--model", "demo", "--output", "o", "--benchmarks", "aime27"], "no benchmark of that name"),
        (["--model", "demo", "--output", "o", "--benchmarks", "tasks,tasks"], "occurs twice"),
    ):
        assert cli.run(["eval", *argv]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_golds_of_the_six_benchmarks_are_graded_as_right(tmp_path) -> None:
    data = os.environ.get("ATTNRL_DATA")
    if not data:
        pytest.skip("set ATTNRL_DATA to the directory with the benchmark files")
    rows = [
        {"benchmark": name, "row": row, "response": rf"</think> \boxed{{{record.answers[0]}}}"}
        for name in load_config("").evaluation.benchmarks
        for row, record in enumerate(load_benchmark(name, data), start=1)
    ]
    file = write(tmp_path / "golds.jsonl", rows)
    assert cli.run(["eval", "--responses", file, "--data-dir", data, "--output", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    problems = {name: table["problems"] for name, table in results["benchmarks"].items()}
    assert problems == {"aime24": 30, "aime25": 30, "amc23": 40, "math500": 500, "minerva": 272, "olympiad": 674}
    assert {name: table["pass@1"] for name, table in results["benchmarks"].items()} == dict.fromkeys(
        load_config("").evaluation.benchmarks, 1.0
    )
    assert results["average"]["pass@1"] == 1.0
    assert results["benchmarks"]["amc23"]["mean_tokens"] is None  # the file does not say
    assert results["benchmarks"]["amc23"]["truncated"] is None
