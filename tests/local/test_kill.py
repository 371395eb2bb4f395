"""A run killed with SIGKILL and resumed leaves what a run that was left alone leaves, to the bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks/kill_resume.py"


def test_killed_and_resumed_runs_are_identical_to_the_whole_one(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("kill_resume", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    kill_resume = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kill_resume)
    rows = kill_resume.measure(tmp_path, kills=2, iterations=3, seed=1)
    assert len(rows) == 2
    assert all(all(row["identical"].values()) for row in rows), rows
