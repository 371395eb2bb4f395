"""attnrl verify: verdicts, summary and its messages for bad rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from attnrl.cli import run

ROWS = [
    {"id": 1, "response": r"so \boxed{\frac{1}{2}}", "gold": "0.5"},
    {"id": 2, "response": r"so \boxed{3}", "gold": ["4", "5"]},
    {"id": 3, "response": r"so \boxed{3}", "gold": ""},
    {"id": 4, "response": r"so \boxed{9^{9^{9^{9}}}}", "gold": "3"},
]


def _write(path: Path, rows: list[object]) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.mark.parametrize("name", ["responses.jsonl", "responses.jsonl.gz"])
def test_verdicts_and_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    source = _write(tmp_path / name, list(ROWS))
    output = tmp_path / "verdicts.jsonl"
    assert run(["verify", str(source), "--output", str(output)]) == 0
    verdicts = [json.loads(line) for line in output.read_text().splitlines()]
    assert verdicts == [
        {"id": 1, "gold": "0.5", "reward": 1.0, "rule": "number", "answer": r"\frac{1}{2}", "error": None},
        {"id": 2, "gold": ["4", "5"], "reward": 0.0, "rule": "number", "answer": "3", "error": None},
        {"id": 3, "gold": "", "reward": 0.0, "rule": "empty_gold", "answer": None, "error": "empty_gold"},
        {"id": 4, "gold": "3", "reward": 0.0, "rule": "limit", "answer": "9^{9^{9^{9}}}", "error": None},
    ]
    table = capsys.readouterr().out
    counts = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in table.splitlines() if "│" in line}
    assert (counts["right"], counts["wrong"], counts["error: empty_gold"]) == ("1", "2", "1")
    assert counts["by rule: limit"] == "1"
    assert counts["by rule: number"] == "2"


def test_a_null_gold_is_named_by_its_row_and_the_others_are_graded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROWS[0], {"response": r"\boxed{1}", "gold": None}, {"response": r"\boxed{1}", "gold": [None]}]
    rows += [{"response": r"\boxed{1}", "gold": [None, "1"]}]
    source = _write(tmp_path / "a.jsonl", list(rows))
    assert run(["verify", str(source)]) == 0
    said = capsys.readouterr().out
    assert "a.jsonl:2: the gold is null" in said
    assert "a.jsonl:3: the gold is null" in said
    assert "a.jsonl:4" not in said
    verdicts = [json.loads(line) for line in (tmp_path / "a.jsonl.verdicts.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in verdicts] == [1.0, 0.0, 0.0, 1.0]
    assert [row["error"] for row in verdicts] == [None, "empty_gold", "empty_gold", None]


def test_numbers_are_golds_like_text(tmp_path: Path) -> None:
    rows = [{"response": r"\boxed{4}", "gold": gold} for gold in (4, 4.0, [3, 4], 5)]
    assert run(["verify", str(_write(tmp_path / "a.jsonl", rows))]) == 0
    written = (tmp_path / "a.jsonl.verdicts.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward"] for line in written] == [1.0, 1.0, 1.0, 0.0]


def test_a_reference_may_have_the_names_that_eval_knows_and_comes_out_as_gold(tmp_path: Path) -> None:
    rows = [{"response": r"\boxed{4}", "answer": 5}, {"response": r"\boxed{4}", "answers": ["4"], "answer": "5"}]
    rows += [{"response": r"\boxed{4}", "ground_truth": "4"}, {"response": r"\boxed{4}", "answer": "4", "gold": "3"}]
    assert run(["verify", str(_write(tmp_path / "a.jsonl", list(rows)))]) == 0
    verdicts = [json.loads(line) for line in (tmp_path / "a.jsonl.verdicts.jsonl").read_text().splitlines()]
    assert [(v["gold"], v["answer"], v["reward"]) for v in verdicts] == [
        (5, "4", 0.0), (["4"], "4", 1.0), ("4", "4", 1.0), ("3", "4", 0.0),
    ]  # fmt: skip


def test_the_output_stands_beside_the_input_by_default(tmp_path: Path) -> None:
    source = _write(tmp_path / "a.jsonl", ROWS[:1])
    assert run(["verify", str(source)]) == 0
    assert len((tmp_path / "a.jsonl.verdicts.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"response": "x"}', "bad.jsonl:2: field 'gold' is missing; looked for gold, answers, answer, ground_truth"),
        ('{"response": "x", "answer": {}}', "bad.jsonl:2: field 'answer' must be text, a number, or a list of them"),
        ('{"gold": "x"}', "bad.jsonl:2: field 'response' is missing"),
        ('{"response": 3, "gold": "x"}', "bad.jsonl:2: field 'response' must be text, not int"),
        ('{"response": "x", "gold": [{}]}', "bad.jsonl:2: field 'gold' must be text, a number, or a list of them"),
        ("[1, 2]", "bad.jsonl:2: a row must be an object with named columns, not list"),
        ("{nonsense", "bad.jsonl:2 (line 2): not JSON"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    assert run(["verify", str(source)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "bad.jsonl.verdicts.jsonl").exists()


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(tmp_path / "none.jsonl")]) == 2
    (tmp_path / "empty.jsonl").write_text("\n")
    assert run(["verify", str(tmp_path / "empty.jsonl")]) == 2
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b"{}\n")[:-6])
    assert run(["verify", str(tmp_path / "torn.jsonl.gz")]) == 2
    said = capsys.readouterr().err
    assert "no such file" in said
    assert "empty.jsonl: no rows" in said
    assert "broken gzip file" in said
