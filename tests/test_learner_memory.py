"""benchmarks/learner_memory.py runs the cases that it names, rehearsed at a tiny shape."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import learner_memory as benchmark


def test_its_cases_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(benchmark.TINY, "num_hidden_layers", 15)
    args = argparse.Namespace(tiny=True, fused=False, tied=False, device="cpu", tokens=512, updates=1)
    found = [
        benchmark.run(case, args)
        for case in (
            ("1.5B", 8192, 14, "adamw"),
            ("1.5B", 8192, "none", "adamw_8bit"),
            ("7B", 8192, "auto", "adamw_offloaded"),
        )
    ]
    assert [row["train/recomputed_layers"] for row in found] == [14, 0, 15]  # auto on a CPU: all
    for row in found:
        # four rows of 128 tokens, the last of which is not read; a minibatch is two rows in one microbatch of 256
        assert (row["policy/updates"], row["train/microbatches"]) == (2, 2)
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(4 * 127)
    assert found[0]["policy/loss"] == found[2]["policy/loss"] != 0
    assert found[0]["forecast_gb"] > found[2]["forecast_gb"]
    assert (found[0]["forecast_host_gb"], found[2]["forecast_host_gb"] > 0) == (0, True)
