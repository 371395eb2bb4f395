"""Scripts of this folder that tests run in processes of their own."""

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
