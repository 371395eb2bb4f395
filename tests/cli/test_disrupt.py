from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from attnrl.cli import run

WORDS = ["disrupt", "--model", "demo", "--task-count", "6", "--samples", "1", "--chunk", "4"]


def test_a_killed_experiment_goes_on_to_the_same_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "d"
    assert run([*WORDS, "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert "FCI top 20 %" in said
    assert "minus that of hiding entropy top 20 %" in said
    file = output / "trials.jsonl"
    whole = file.read_text()
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [line["response"] for line in lines] == list(range(6))
    results = (output / "results.json").read_text()
    trials = [trial for line in lines for trial in line["trials"]]
    assert json.loads(results)["types"][0]["trials"] == sum(t["type"] == "fci_top" for t in trials) > 0
    assert all(
        0 <= trial["position"] < 1 and trial["step"] < line["steps"] - 1 for line in lines for trial in line["trials"]
    )
    file.write_text("".join(f"{line}\n" for line in whole.splitlines()[:2]) + whole.splitlines()[2][:30])  # torn
    assert run([*WORDS, "--output", str(output)]) == 0
    assert file.read_text() == whole
    assert (output / "results.json").read_text() == results
    for flags, change in (
        (["--delta", "2"], "delta was 4, is now 2"),
        (["--samples", "2"], "samples was {'tasks': 1}, is now {'tasks': 2}"),
        (["--reward", "exact"], "reward was [{'name': 'math',"),
        (["--task-count", "7"], "other problems, or another number of them, or another template: tasks"),
    ):
        assert run([*WORDS, "--output", str(output), *flags]) == 2
        assert f"holds an experiment with other settings ({change}" in capsys.readouterr().err
    assert file.read_text() == whole
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run([*WORDS, "--output", str(output)]) == 2
    assert "another experiment is writing there" in capsys.readouterr().err


def test_mistakes_are_said_before_a_model_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["disrupt", "--model", "demo", "--output", str(tmp_path), "--engine.name", "verl"]) == 2
    assert "needs the local engine" in capsys.readouterr().err
