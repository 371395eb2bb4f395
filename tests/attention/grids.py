"""What tests of attention share: dense attention, and scripts of this folder in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU; its source runs everywhere",
)


def run(script: str, *options: str, **env: str) -> list[dict[str, object]]:
    """The JSON lines of a script in a process of its own: Triton reads TRITON_INTERPRET when kernels are defined."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of queries from position `start` on, [Q, H, D], and its log-sum-exp, [H, Q]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,shd->hqs", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    positions = torch.arange(len(k), device=k.device)
    scores = scores.masked_fill(positions > positions[start : start + len(q), None], -torch.inf)
    return torch.einsum("hqs,shd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)
