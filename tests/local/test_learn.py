"""The learner's own kernels: the same gradients as the model's own forward, and compiled for Hopper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def check_grid(**env: str) -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when kernels are defined."""
    pytest.importorskip("triton", reason="triton is published for Linux on x86-64 only")
    command = [sys.executable, str(Path(__file__).with_name("learn_grid.py"))]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::RuntimeWarning", **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["kind"] for row in rows] == ["qwen2", "qwen3", "llama", "llama"]
    for row in rows:
        assert row["error"] < (1e-5 if row["dtype"] == "torch.float32" else 2e-2), row
        assert row["norm"] > 1e-2, row


def test_gradients_of_the_fused_learner_under_the_interpreter() -> None:
    check_grid(TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the interpreter test runs everywhere")
def test_gradients_of_the_fused_learner_compiled() -> None:
    check_grid()
