from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnrl.analysis.records import distinct_names, read_metrics, read_run
from attnrl.errors import DataError, MissingFileError
from attnrl.run import open_run


def small_run(path: Path, lines: str = '{"iteration": 0.0}\n') -> Path:
    open_run(path, {"about": "x", "algo": {"rule": "fci"}}, resume=False)
    (path / "metrics.jsonl").write_text(lines)
    return path


def test_reads_what_training_wrote(tmp_path: Path) -> None:
    record = read_run(small_run(tmp_path / "demo", '{"iteration": 0.0}\n{"iteration": 1.0, "a/b": 2}\n'))
    assert record.name == "demo"
    assert record.metrics == [{"iteration": 0.0}, {"iteration": 1.0, "a/b": 2}]
    assert record.setting("algo.rule") == "fci"
    assert record.setting("algo.rule.x") is record.setting("none.such") is None
    assert "python" in record.environment
    assert record.forest_files == ()


@pytest.mark.parametrize(
    ("rule", "most", "branches"),
    [
        ("none", None, False),  # nothing on record yet
        ("fci", None, True),
        ("oracle", None, True),
        ("mine:rule", None, True),
        ("mine:rule", 0, False),
        ("mine:rule", 2, True),
        ("none", 0, False),
        ("fci", 2, True),
    ],
)
def test_whether_a_run_branches_is_what_its_rule_declares(
    tmp_path: Path, rule: str, most: int | None, branches: bool
) -> None:
    open_run(tmp_path, {"algo": {"rule": rule}}, resume=False)
    row = {"iteration": 1} | ({} if most is None else {"trees/most_points": float(most)})
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0}\n' + json.dumps(row) + "\n")
    assert read_run(tmp_path).branches is branches


MINE = {"reads": ["fci", "logprobs"], "by_quantile": True}
NOTHING = {"reads": [], "by_quantile": False}


@pytest.mark.parametrize(
    ("rule", "recorded", "known"),
    [
        ("mine:rule", MINE, MINE),
        ("fci", NOTHING, NOTHING),  # what is on record goes before the name
        ("fci", None, {"reads": ["fci"], "by_quantile": True}),  # a run from before it was recorded
        ("step_entropy", None, {"reads": ["entropy"], "by_quantile": False}),
        ("mine:rule", None, NOTHING),
    ],
)
def test_what_a_rule_reads_is_what_it_declared(
    tmp_path: Path, rule: str, recorded: dict[str, object] | None, known: dict[str, object]
) -> None:
    open_run(tmp_path, {"algo": {"rule": rule}}, resume=False, rule=recorded)
    assert read_run(tmp_path, begun=False).rule == known


def test_a_line_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"iteration": 1}\n{"iteration": 2, "policy/lo\xc3')
    assert read_metrics(file) == [{"iteration": 1}]


@pytest.mark.parametrize(
    ("text", "row", "words"),
    [
        ('{"iteration": 1}\n{"iteration": \n{"iteration": 3}\n', 2, "not a JSON object"),
        ("[1, 2]\n", 1, "iteration"),
        ('{"iteration": 1}\n{"loss": 3}\n', 2, "iteration"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: str, row: int, words: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=rf"metrics\.jsonl:{row}: .*{words}"):
        read_metrics(file)


@pytest.mark.parametrize("text", ["", '{"iteration": 1'])
def test_no_finished_iteration(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="no finished iteration"):
        read_run(small_run(tmp_path / "run", text))


def test_missing_directory_and_files(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="nowhere does not exist"):
        read_run(tmp_path / "nowhere")
    run = small_run(tmp_path / "whole", '{"iteration": 1}')
    with pytest.raises(MissingFileError, match=r"metrics\.jsonl is a file, no run directory; give the folder"):
        read_run(run / "metrics.jsonl")
    with pytest.raises(MissingFileError, match=r"holds no metrics\.jsonl"):
        read_run(tmp_path)
    run = small_run(tmp_path / "run")
    (run / "environment.json").unlink()
    assert read_run(run).environment == {}
    (run / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json:1: not valid JSON"):
        read_run(run)
    (run / "config.json").unlink()
    with pytest.raises(MissingFileError, match=r"holds no config\.json"):
        read_run(run)


@pytest.mark.parametrize(
    ("command", "preset"),
    [
        (["/bin/attnrl", "train", "demo_grpo", "--run-dir", "x"], "demo_grpo"),
        (["/bin/attnrl", "train", "--help"], None),
        (["/bin/attnrl", "demo"], None),
    ],
)
def test_preset_from_the_command_line(tmp_path: Path, command: list[str], preset: str | None) -> None:
    run = small_run(tmp_path / "run")
    (run / "environment.json").write_text(json.dumps({"command": command}))
    assert read_run(run).preset == preset


def test_a_directory_named_twice(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="named twice"):
        distinct_names([tmp_path, tmp_path / "x" / ".."])
