from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from attnrl.cli import run
from attnrl.run import open_run


def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    open_run(tmp_path / "demo", {"about": "tiny"}, resume=False).log({"iteration": 0.0, "eval/tasks/pass@1": 0.5})
    command = [sys.executable, "-m", "attnrl", "view", str(tmp_path / "demo"), "--port", "0"]
    root = str(Path(run.__code__.co_filename).parents[2])  # the code under test, wherever the process starts
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    )
    try:
        assert process.stdout is not None
        found = re.match(r"(http://127\.0\.0\.1:\d+/)   \(Ctrl-C ends it\)", process.stdout.readline())
        assert found
        with urlopen(found[1], timeout=30) as answer:
            assert b"<title>demo \xc2\xb7 attnrl view</title>" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()


def test_mistakes_end_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["view", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"attnrl view: run directory {tmp_path / 'nowhere'} does not exist\n"
    assert run(["view"]) == 2
    assert "give run directories" in capsys.readouterr().err
