"""attnrl data: the report, its JSON, the cleaned file, and mistakes."""

import json

import pytest

from attnrl.cli.data import main
from attnrl.data.records import load_records
from attnrl.errors import ConfigError, DataError


@pytest.fixture
def files(tmp_path):
    rows = [
        ("1+1?", "2"),
        ("$1 + 1$?", "3"),
        ("2+2?", "4"),
        ("2 + 2?", "8/2"),
        ("3+3?", ""),
        (r"is $\boxed{7}$", "7"),
        ("9?", "9"),
    ]
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps({"problem": p, "answer": a}) + "\n" for p, a in rows))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"problem": "$9$?", "answer": "9"}) + "\n")
    return train, held_out, tmp_path


def test_report_and_clean_file(files, capsys):
    train, held_out, folder = files
    written = ["--json-file", f"{folder}/r.json", "--clean", f"{folder}/c.jsonl"]
    main([str(train), "--against", str(held_out), *written])
    shown = capsys.readouterr().out
    for line in (
        "7 rows, layout problem/answer",
        "empty answer: 1 row left out: 5",
        "duplicates: 2 further copies in 2 groups: 1=2, 3=4",
        "conflicting answers: 2 of these groups as written, 2 beyond spelling: 1=2, 3=4",
        "answer shown in the problem: 1 row: 6",
        "benchmark problems, repeat (the same problem): 1 row: 7 (held_out.jsonl:1)",
        "1 of 6 rows kept; left out: 1 benchmark problem, 1 leaked answer, 2 in 1 group with conflicting answers, "
        "1 further copy (1 group conflicting as written but not in value)",
    ):
        assert line in shown
    report = json.loads((folder / "r.json").read_text())
    assert report[0]["skipped"] == {"empty answer": [5]}
    assert report[0]["contamination"] == [
        {"row": 7, "benchmark": "held_out.jsonl:1", "kind": "repeat", "share": 1.0, "same_answer": True}
    ]
    kept = load_records(folder / "c.jsonl")
    assert [(r.problem, r.answers) for r in kept] == [("2+2?", ("4",))]


def test_no_file_is_a_mistake():
    with pytest.raises(ConfigError, match="at least one file"):
        main([])


def test_columns_of_other_names_can_be_named(tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"task": "1 + 1", "key": "2"}\n{"task": "1 + 1", "key": "2"}\n')
    with pytest.raises(DataError, match=r"columns found: task, key.*`attnrl data`: --columns"):
        main([str(file)])
    main([str(file), "--columns", '{problem = "task", answer = "key"}'])
    assert "2 rows, layout task/key" in (said := capsys.readouterr().out)
    assert "1 further copy" in said
