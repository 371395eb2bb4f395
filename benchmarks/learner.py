"""Warm-up and update throughput on one device: tokens per second, peak memory, and what shared prefixes save.

    python benchmarks/learner.py --device cuda --layers 8 --width 512 --seconds 20 --output learner.json

Prints and writes JSON. Samples have the shape of AttnRL's forests (6 trunks, 2 branch points, 2 branches each) and of
GRPO's groups, with random tokens after real prompts; every number of one run is measured in one process.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnrl.config import TaskConfig, UpdateConfig
from attnrl.local.examples import make_batch, make_examples
from attnrl.local.learner import Learner
from attnrl.local.shape import Shape
from attnrl.local.warmup import Warmup, prepare_warmup
from attnrl.local.warmup_options import WarmupOptions
from attnrl.types import Sample, as_floats, as_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--microbatch-tokens", type=int, default=65536)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0, help="of warm-up")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    shape = Shape(layers=args.layers, width=args.width, heads=args.width // 32, kv_heads=args.width // 64)
    options = WarmupOptions(seconds=args.seconds, batch_tokens=args.batch_tokens, evaluations=2, evaluation_tasks=256)
    with tempfile.TemporaryDirectory() as folder:
        spec = TaskConfig(operations=(4, 12))
        run = prepare_warmup(Path(folder, "model"), spec, options, shape=shape, device=args.device)
        result: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if run.model.device.type == "cuda" else "cpu",
            "dtype": str(run.model.dtype),
            "parameters": sum(p.numel() for p in run.model.parameters()),
            "update_tokens_per_second": update_speed(run),
            "warmup": run.train(),
        }
        rng = np.random.default_rng(0)
        for name, samples in (("forest", forests(run, args.prompts, rng)), ("group", groups(run, args.prompts, rng))):
            result[name] = {
                "shared": learner_speed(run, samples, args.microbatch_tokens, share=True),
                "apart": learner_speed(run, samples, args.microbatch_tokens, share=False),
            }
            result[name]["speed_up"] = result[name]["apart"]["seconds"] / result[name]["shared"]["seconds"]
    text = json.dumps(result, indent=1)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


def wait(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def update_speed(run: Warmup, count: int = 20) -> float:
    """Tokens per second of supervised updates on batches that are ready: the device alone, no data workers."""
    made = [make_batch(run.source, i) for i in range(4)]
    for batch in made[:3]:
        run.update(batch, 1e-4)
    begin = wait(run.model.device)
    for i in range(count):
        run.update(made[i % 4], 1e-4)
    return count * run.source.tokens / (wait(run.model.device) - begin)


def sample(prompt: np.ndarray, response: np.ndarray, uid: str, rng: np.random.Generator) -> Sample:
    n = len(response)
    return Sample(prompt, as_ids(response), as_floats(rng.normal(size=n)), as_floats(-np.ones(n)), uid=uid)


def forests(run: Warmup, prompts: int, rng: np.random.Generator) -> list[Sample]:
    rows, vocabulary = [], len(run.tokenizer)
    for e in make_examples(run.source, "test", 0, prompts):
        n = len(e.solution)
        for _ in range(6):
            trunk = rng.integers(4, vocabulary, n)
            rows.append(sample(e.prompt, trunk, e.task.key, rng))
            for point in (n // 4, n // 2):
                for _ in range(2):
                    tail = rng.integers(4, vocabulary, n - point)
                    rows.append(sample(e.prompt, np.concatenate([trunk[:point], tail]), e.task.key, rng))
    return rows


def groups(run: Warmup, prompts: int, rng: np.random.Generator) -> list[Sample]:
    examples = make_examples(run.source, "test", 0, prompts)
    return [
        sample(e.prompt, rng.integers(4, len(run.tokenizer), len(e.solution)), e.task.key, rng)
        for e in examples
        for _ in range(8)
    ]


def learner_speed(run: Warmup, samples: list[Sample], microbatch: int, *, share: bool) -> dict[str, float]:
    model = copy.deepcopy(run.model)
    options = UpdateConfig(
        microbatch_tokens=microbatch, share_prefixes=share, minibatches=2, gradient_checkpointing="none"
    )
    learner = Learner(model, run.model, options=options)
    learner.update(samples, version=0)
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = wait(model.device)
    metrics = learner.update(samples, version=1)
    seconds = wait(model.device) - begin
    peak = torch.cuda.max_memory_allocated() / 1e9 if model.device.type == "cuda" else 0.0
    kept = ("train/path_tokens", "train/forward_tokens", "train/microbatches", "policy/loss", "policy/grad_norm")
    return {"seconds": seconds, "peak_memory_gb": peak, **{k: metrics[k] for k in kept}}


if __name__ == "__main__":
    main()
