from __future__ import annotations

from pathlib import Path

import pytest

from attnrl.cli import run
from attnrl.run import open_run


def small_run(path: Path) -> Path:
    open_run(path, {"about": "tiny"}, resume=False).log({"iteration": 0.0, "eval/tasks/pass@1": 0.5})
    return path


def test_one_run_is_reported_in_its_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_run(tmp_path / "demo")
    assert run(["report", str(path)]) == 0
    assert "<title>demo · attnrl report</title>" in (path / "report.html").read_text()
    assert capsys.readouterr().out.startswith(str(path / "report.html"))


def test_several_runs_are_compared_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dirs = [str(small_run(tmp_path / name)) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    assert run(["report", *dirs]) == 0
    assert "<title>a · b · attnrl report</title>" in (tmp_path / "report.html").read_text()
    assert run(["report", *dirs, "--output", "compare.html"]) == 0
    assert (tmp_path / "compare.html").read_bytes() == (tmp_path / "report.html").read_bytes()


@pytest.mark.parametrize("words", [[], ["nowhere"]])
def test_mistakes_end_in_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("attnrl report: ")


@pytest.mark.parametrize("command", ["report", "view", "compare", "figures"])
def test_a_folder_of_runs_is_said_to_be_one(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dirs = [str(small_run(tmp_path / "demo" / name)) for name in ("a", "b")]
    out = ["--out", str(tmp_path / "figures")] if command == "figures" else []
    assert run([command, str(tmp_path / "demo"), *out]) == 2
    assert (
        f"{tmp_path / 'demo'} is no run directory, but holds some; give {' '.join(dirs)}\n" in capsys.readouterr().err
    )


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(["report", "--help"])
    assert stopped.value.code == 0
    assert "attnrl report runs/a runs/b" in capsys.readouterr().out
