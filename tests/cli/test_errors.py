"""A run whose rewards fail: it stops, says why, and leaves no process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SMALL = "--algo.prompts 2 --algo.group 2 --run.iterations 3 --evaluation.every 0 --data.train_tasks 50"


def test_a_batch_of_errors_alone_stops_the_run_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text("def broken(attempts):\n    raise KeyError('no such column')\n")
    words = ["train", "demo", "--run-dir", "run", "--reward", "faulty:broken", *SMALL.split()]
    answer = subprocess.run(
        [sys.executable, "-m", "attnrl", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert answer.returncode == 2, answer.stderr
    assert "4 of 4 rewards of a batch are errors" in answer.stderr
    assert "no such column" in answer.stderr
    assert not (tmp_path / "run/metrics.jsonl").exists()
