"""Runs of the real command that fail or learn nothing: they say why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnrl.cli import presets, run
from attnrl.errors import TrainingError

SMALL = "--algo.prompts 2 --algo.group 2 --run.iterations 3 --evaluation.every 0 --data.train_tasks 50"


def attnrl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "attnrl", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"COLUMNS": "200"},
    )


def test_a_batch_of_errors_alone_stops_the_run_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text("def broken(attempts):\n    raise KeyError('no such column')\n")
    words = ["train", "demo", "--run-dir", "run", "--reward", "faulty:broken", *SMALL.split()]
    answer = attnrl(tmp_path, *words)
    assert answer.returncode == 2, answer.stderr
    assert "4 of 4 rewards of a batch are errors" in answer.stderr
    assert "no such column" in answer.stderr
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_prompts_that_the_model_cannot_read_at_all_are_refused(tmp_path: Path) -> None:
    rows = [{"problem": f"Janet has {n} ducks. How many eggs does she sell?", "answer": "9"} for n in (3, 4)]
    (tmp_path / "far.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["train", "demo", "--run-dir", "run", "--data.train", '["far.jsonl"]', "--evaluation.every", "0"]
    answer = attnrl(tmp_path, *words)
    assert answer.returncode == 2
    assert "data.train: 2 of 2 prompts hold words that this model's tokenizer does not know" in answer.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_that_learns_nothing_says_so_and_keeps_its_best_all_the_same(tmp_path: Path) -> None:
    """Responses of at most 8 tokens are all cut off: nothing can be right, nothing is trained on."""
    held_out = "--evaluation.every 1 --evaluation.tasks 4 --run.keep_best eval/tasks/pass@1"
    words = f"{SMALL.replace('--evaluation.every 0', held_out)} --sampling.max_response_tokens 8"
    answer = attnrl(tmp_path, "train", "demo", "--run-dir", "run", *words.split())
    assert answer.returncode == 0, answer.stderr
    said = "nothing trained in 3 of 3 iterations: all responses wrong, 100 % cut off at 8 tokens, no trunk branched"
    assert said in answer.stdout
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    best = json.loads((tmp_path / "run/best/best.json").read_text())
    assert best["value"] == max(row["eval/tasks/pass@1"] for row in rows if row["iteration"] > 0)
    assert (tmp_path / "run/best/model/config.json").exists()
    assert attnrl(tmp_path, "report", "run").returncode == 0
    assert "nothing trained in 3 of 3 iterations" in (tmp_path / "run/report.html").read_text()


def test_what_an_error_notes_is_said_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> None:
        error = TrainingError("the engine broke")
        error.add_note("Grading had failed too: ValueError: no judge")
        raise error

    monkeypatch.setattr(presets, "main", fail)
    assert run(["presets"]) == 2
    assert capsys.readouterr().err == "attnrl presets: the engine broke\nGrading had failed too: ValueError: no judge\n"


FAULTY = """
import sys

from attnrl.local.backend import build


def pipe(prompt, trunk, rng):
    raise BrokenPipeError("the judge has gone")


def nowhere(prompt, trunk, rng):
    return [len(open("no such file").read())]


def leaves(prompt, trunk, rng):
    sys.exit(0)


def quits(state, parts):
    sys.exit("enough")


def lost(config, **options):
    engine = build(config, **options)

    def update(samples):
        raise ConnectionError("engine lost")

    engine.update = update
    return engine
"""


def test_what_a_part_or_an_engine_raises_is_shown_where_it_happened_and_whose_it_is(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    small = [*SMALL.split(), "--algo.filter", "all", "--algo.adaptive_batch", "false"]
    cases = (
        ("algo.rule", "pipe", 1, "BrokenPipeError: the judge has gone\nalgo.rule: raised by the rule pipe"),
        ("algo.rule", "nowhere", 1, "directory: 'no such file'\nalgo.rule: raised by the rule nowhere"),
        ("engine.name", "lost", 1, "ConnectionError: engine lost\nengine.name: raised by the engine LocalBackend"),
        ("algo.rule", "leaves", 2, "attnrl train: algo.rule: the rule leaves called sys.exit(0); let it raise"),
        ("algo.schedule", "quits", 2, "algo.schedule: the schedule quits called sys.exit('enough'); let it raise"),
    )
    for key, name, code, said in cases:
        answer = attnrl(tmp_path, "train", "demo", "--run-dir", name, f"--{key}", f"faulty:{name}", *small)
        assert answer.returncode == code, (name, answer.stderr)
        assert said in answer.stderr, (name, answer.stderr)
        assert ("faulty.py" in answer.stderr) == (code == 1)  # its line, where something broke
