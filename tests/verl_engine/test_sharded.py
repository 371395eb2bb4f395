"""The ranks' work on two real gloo processes, torch alone: no verl is needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny


def test_two_ranks_with_uneven_packs_and_chunks_equal_one_process(tmp_path):
    model = tiny.make_model(tmp_path / "model")
    script = Path(__file__).parent / "two_ranks.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        list(map(str, [*torchrun, script, model, tmp_path])),
        env=tiny.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for number in range(2):
        rank = json.loads((tmp_path / f"{number}.json").read_text())
        assert rank["score_gap"] <= 1e-6
        assert rank["loss"][0] == pytest.approx(rank["loss"][1], rel=1e-5)
        assert rank["gradient"] > 1e-2
        assert rank["gradient_gap"] <= 1e-6
