"""The ranks' work on real gloo processes, against one model in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_llama import make_model


def torchrun(work: str, ranks: int, model: Path, folder: Path) -> list[dict]:
    """What each rank wrote of its work."""
    script = Path(__file__).parent / "two_ranks.py"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command = list(map(str, [*words, script, work, model, folder]))
    single = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=single, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{work}-{ranks}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def test_two_ranks_with_uneven_packs_and_chunks_equal_one_process(model, tmp_path):
    for rank in torchrun("equal", 2, model, tmp_path):
        assert rank["score_gap"] <= 1e-6
        assert rank["loss"][0] == pytest.approx(rank["loss"][1], rel=1e-5)
        assert rank["gradient"] > 1e-2
        assert rank["gradient_gap"] <= 1e-6


def test_an_update_of_two_ranks_is_the_local_learners(model, tmp_path):
    """Three optimizer steps with a KL to other weights and with importance weights: each needs what was before it."""
    ranks = torchrun("update", 2, model, tmp_path)
    for rank in ranks:
        assert rank["counters"] == {"updates": 3, "skipped": 0, "skipped_in_a_row": 0}
        assert len(rank["norms"]) == 3
        assert rank["ranks"]["policy/kl"] > 1e-2
        assert rank["ranks"] == pytest.approx(rank["local"], rel=1e-5, abs=1e-7)
    assert ranks[0]["norms"] == ranks[1]["norms"]


def test_a_loss_that_is_no_number_on_one_rank_leaves_the_update_out_on_all(model, tmp_path):
    ranks = torchrun("bad", 2, model, tmp_path)
    for rank in ranks:
        rows = rank["rows"]  # norms and skipped of the call; updates, skipped and skipped in a row since the start
        assert [row["counted"] for row in rows] == [[1, 0, 1, 0, 0], [0, 1, 1, 1, 1], [1, 0, 2, 1, 0], [0, 1, 2, 2, 1]]
        first, left_out, second, again = (row["checksum"] for row in rows)
        assert first == left_out != second == again
        assert rank["error"].startswith("2 updates in a row had a non-finite loss")
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_checkpoint_loads_at_another_number_of_ranks(model, tmp_path, before, after):
    """The next update is that of the run that was not interrupted: weights and Adam's state are all there."""
    whole = torchrun("train", before, model, tmp_path)[0]
    again = torchrun("resume", after, model, tmp_path)[0]["third"]
    assert whole["first"][1]["checksum"] != whole["third"]["checksum"]
    for name in ("loss", "norm", "checksum"):
        assert again[name] == pytest.approx(whole["third"][name], rel=1e-6, abs=0)


def test_the_model_directory_has_the_dtype_that_its_config_says(model, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    torchrun("train", 2, make_model(tmp_path / "tied", tied=True), tmp_path)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype="auto")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "bfloat16", dtype="auto")
    assert (exact.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    assert json.loads((tmp_path / "bfloat16" / "config.json").read_text())["dtype"] == "bfloat16"
    assert exact.lm_head.weight is exact.model.embed_tokens.weight
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "tied", dtype="auto").state_dict()
    for name, value in exact.state_dict().items():
        assert torch.equal(value.bfloat16(), half.state_dict()[name])
        assert not torch.equal(value, start[name])


def test_a_checkpoint_before_the_first_update_counts_no_step(model, tmp_path):
    saved, loaded, plain = torchrun("fresh", 1, model, tmp_path)[0]["updates"]
    assert saved == loaded == plain
