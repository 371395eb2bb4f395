"""The vLLM sampler over vLLM itself, in its CPU build: `make test-verl` has it; skipped where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-verl has it"),
]
SOURCE = Path(__file__).parents[2] / "src"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(p for p in (str(SOURCE), os.environ.get("PYTHONPATH", "")) if p),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
}

DRAW = """
import json
import sys
import warnings

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attnrl.local.vllm_sampler import VllmSampler
from attnrl.types import Request, Sampling, as_ids

STOP = 7
torch.manual_seed(0)
sizes = {"vocab_size": 160, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
states = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32, "mamba_d_ssm": 256}
more = {"falcon_h1": states | {"mamba_chunk_size": 64}, "llama": {}}[sys.argv[1]]
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(sys.argv[1], **sizes, **more), dtype=torch.float32)
rng = np.random.default_rng(0)
shared = rng.integers(8, 150, size=40)  # more than a block of vLLM's prefix cache
contexts = [shared[:30], shared, shared, *(rng.integers(8, 150, size=n) for n in (1, 9))]
requests = [Request(as_ids(context), 24, seed) for seed, context in enumerate(contexts)]


def gap(rollouts, temperature):
    worst = 0.0
    for request, rollout in zip(requests, rollouts, strict=True):
        ids = torch.tensor([*request.context.tolist(), *rollout.ids.tolist()])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids[None]).logits[0] / temperature, -1)
        first = len(request.context)
        own = logprobs[first - 1 : -1].gather(1, ids[first:, None])[:, 0]
        worst = max(worst, (own - torch.from_numpy(rollout.logprobs)).abs().max().item())
    return worst


def change():
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


sampler = VllmSampler(model, stop_ids=[STOP], longest=128, rows=16)
found = {"gaps": []}
for version, temperature in enumerate((1.0, 0.7, 1.0)):  # the contexts of every call but the first are in its cache
    rollouts = sampler.generate(requests, Sampling(temperature), version=version)
    found["gaps"].append(gap(rollouts, temperature))
    assert all(r.version == version and 1 <= len(r.ids) <= 24 for r in rollouts)
    assert all((r.finish == "stop") == (int(r.ids[-1]) == STOP) for r in rollouts)
    sampler.rest()  # nothing to give back on a CPU
    change()
    sampler.sync()
sampler._llm.generate = lambda *args, **options: (_ for _ in ()).throw(RuntimeError("the engine is gone"))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    found["gaps"].append(gap(sampler.generate(requests, Sampling(), version=3), 1.0))
found |= sampler.metrics()
sampler.close()
print("FOUND", json.dumps(found), flush=True)
"""


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_log_probs_are_the_model_s_after_every_change_of_weights_and_after_a_new_engine(
    family: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRAW, family], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    lines = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, (done.stdout + done.stderr)[-3000:]
    found = json.loads(lines[0])
    assert len(found["gaps"]) == 4
    assert max(found["gaps"]) < 1e-4, found
    assert found["generate/vllm_restarts"] == 1


def test_a_run_draws_through_vllm(tmp_path: Path) -> None:
    flags = "--iterations 2 --algo.prompts 4 --algo.max_prompts 4 --evaluation.every 0 --engine.local.sampler vllm"
    words = [sys.executable, "-m", "attnrl", "train", "demo", "--run-dir", str(tmp_path / "run"), *flags.split()]
    done = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "generate/vllm_seconds" in row]
    assert [row["iteration"] for row in rows] == [1.0, 2.0]
    assert all(row["generate/vllm_seconds"] > 0 for row in rows)
    assert rows[1]["generate/vllm_sync_seconds"] > 0  # the update of the first iteration was shown
    assert all(0 <= row["policy/behaviour_kl"] < 0.01 for row in rows)
