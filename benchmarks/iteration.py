"""Whole training iterations, phase by phase: AttnRL through `attnrl.train` at the shape of a real model.

Weights are random, so that no download is needed. Such a model ends no response by itself: every one runs to the limit,
or, with `--lengths`, to a drawn length. Rewards are the parity of a response's hash, steps are 45 tokens long (the
median of the real transcripts), trees those of the preset.

    python benchmarks/iteration.py --prompts 4 --limit 2048 --iterations 3 --tokenizer DIR --out iteration.json
    python benchmarks/iteration.py --prompts 16 --limit 8192 --lengths --plain --tokenizer DIR --out iteration.json

writes seconds per phase, tokens, speeds and memory of each iteration as JSON; `--plain` replays the last iteration the
plain way (`plain.py`) in the same run and adds its seconds and the ratios. `--spare` updates on its samples once more,
by our learner with the settings that need the least memory (`adamw_offloaded`, all layers run again).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import attnrl
from attnrl.backend import Backend
from attnrl.config import load_config
from attnrl.local.backend import build, build_learner
from attnrl.local.models import load_weights
from attnrl.types import Request, Rollout, Sample, Sampling, ScoreRequest, Scores, Scoring
from plain import PHASES, Clock, Work
from plain import run as run_plain
from record import record, write

SHAPES: dict[str, dict[str, int]] = {
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "mini": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
SETTINGS: dict[str, Any] = {
    "data.train": ["tasks"],
    "data.train_tasks": 200,
    "data.decontaminate": [],
    "data.clean": False,
    "reward": "parity:parity",
    "algo.segmenter": "every_n_tokens",
    "algo.segmenter_options": {"tokens": 45},
    "evaluation.every": 0,
    "run.checkpoint_every": 1000,
    "run.save_rollouts_every": 0,
}
# Response lengths are log-normal, as those of 600 transcripts of DeepSeek-R1-Distill-Qwen-1.5B on real problems:
# standard deviation of the logarithm 0.67, mean 0.30 of the 99th percentile, which is put at the limit.
SIGMA, MEAN = 0.67, 0.30
KEPT = (
    "seconds/",
    "generate/",
    "train/",
    "score/",
    "device/",
    "policy/updates",
    "policy/behaviour_kl",
    "policy/ratio_max",
    "trees/",
    "batch/",
)


@dataclass(slots=True)
class Recorder:
    """The local engine. It remembers what the last iteration asked of it, and ends responses at drawn lengths."""

    inner: Backend
    mean: float | None  # response tokens; None: every response runs to its limit
    work: Work = field(default_factory=Work)
    calls: list[tuple[float, int, int]] = field(default_factory=list)  # of generation: seconds, tokens drawn, asked for

    @property
    def version(self) -> int:
        return self.inner.version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        asked = [self._cut(request) for request in requests]
        self.work = replace(self.work, requests=asked)
        began = time.perf_counter()
        rollouts = self.inner.generate(asked, sampling)
        tokens = sum(len(rollout.ids) for rollout in rollouts), sum(request.max_tokens for request in asked)
        self.calls.append((time.perf_counter() - began, *tokens))
        return [replace(rollout, finish="stop") for rollout in rollouts]

    def _cut(self, request: Request) -> Request:
        if self.mean is None:
            return request
        length = np.random.default_rng(request.seed).lognormal(np.log(self.mean) - SIGMA**2 / 2, SIGMA)
        return replace(request, max_tokens=int(np.clip(length, 32, request.max_tokens)))

    def score(self, requests: Sequence[ScoreRequest], scoring: Scoring) -> list[Scores]:
        self.work = replace(self.work, scored=list(requests))
        return self.inner.score(requests, scoring)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        self.work = replace(self.work, samples=list(samples))
        return self.inner.update(samples)

    def metrics(self) -> dict[str, float]:
        return self.inner.metrics()

    def save(self, path: Path) -> None:
        self.inner.save(path)

    def load(self, path: Path) -> None:
        self.inner.load(path)

    def close(self) -> None:
        self.inner.close()


ENGINES: list[Recorder] = []


def engine(config: Any, **given: Any) -> Recorder:
    mean = os.environ.get("ITERATION_MEAN")
    ENGINES.append(Recorder(build(config, **given), float(mean) if mean else None))
    return ENGINES[-1]


def make_model(shape: str, tokenizer: str | None, folder: Path) -> None:
    """A model of that shape with random weights, and its tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from attnrl.data.task_tokenizer import task_tokenizer

    words: Any = task_tokenizer() if tokenizer is None else AutoTokenizer.from_pretrained(tokenizer)
    vocabulary = len(words) if tokenizer is None else 151_936
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        eos_token_id=words.eos_token_id,
        **SHAPES[shape],
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    words.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--tokenizer", default=None, help="directory of a tokenizer; default: that of made-up tasks")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--limit", type=int, default=8192, help="response tokens")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--microbatch-tokens", type=int, default=16_384)
    parser.add_argument("--lengths", action="store_true", help="responses end at drawn lengths, not at the limit")
    parser.add_argument(
        "--plain", nargs="*", choices=PHASES, help="the last iteration again, the plain way, all phases or these"
    )
    parser.add_argument("--spare", action="store_true", help="its update again, with the least memory")
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, default=True, help="update.fused")
    parser.add_argument("--layers", default="all", help="update.gradient_checkpointing: layers that run again")
    parser.add_argument("--optimizer", default="adamw", help="update.optimizer")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("iteration.json"), help="JSON")
    args = parser.parse_args()
    if args.lengths:
        os.environ["ITERATION_MEAN"] = str(args.limit * MEAN)
    rows: list[dict[str, float]] = []
    found = record(args, iterations=rows)

    def keep(metrics: dict[str, float]) -> None:
        rows.append({k: v for k, v in metrics.items() if k.startswith(KEPT)})
        write(args, found)

    with tempfile.TemporaryDirectory() as folder:
        make_model(args.shape, args.tokenizer, Path(folder, "model"))
        attnrl.train(
            "attnrl_1p5b",
            Path(folder, "run"),
            overrides=SETTINGS
            | {
                "model.path": str(Path(folder, "model")),
                **({} if args.tokenizer else {"data.template": "{problem}"}),  # made-up tasks know no other words
                "sampling.max_response_tokens": args.limit,
                "algo.prompts": args.prompts,
                "engine.name": "iteration:engine",
                "update.fused": args.fused,
                "update.gradient_checkpointing": int(args.layers) if args.layers.isdigit() else args.layers,
                "update.optimizer": args.optimizer,
                "engine.local.rows": args.rows,
                "update.microbatch_tokens": args.microbatch_tokens,
                "run.iterations": args.iterations,
            },
            observers=[keep],
        )
        model, work = str(Path(folder, "model")), ENGINES[0].work
        if args.plain is not None or args.spare:
            ENGINES.clear()
            free()
        if args.plain is not None:
            found["plain"] = compared(model, work, args.plain or PHASES, rows[-1], args.microbatch_tokens)
            write(args, found)
            free()
        if args.spare:
            found["spare"] = ours = spared(model, work.samples, args.microbatch_tokens)
            theirs = found.get("plain", {"seconds": {}})
            if "update" in theirs["seconds"]:
                ours["plain_over_ours"] = theirs["seconds"]["update"] / ours["seconds"]["update"]
                ours["memory_of_plain"] = ours["peak_gb"].get("update", 0) / theirs["peak_gb"].get("update", 1)
            write(args, found)


def free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def spared(folder: str, samples: Sequence[Sample], tokens: int) -> dict[str, Any]:
    """Seconds and peak GPU memory of our update of these samples, by the settings that need the least memory."""
    how = {"update.optimizer": "adamw_offloaded", "update.gradient_checkpointing": "all"}
    config = load_config("attnrl_1p5b", {**how, "update.microbatch_tokens": tokens})
    learner = build_learner(config, load_weights(folder, device="auto", dtype="auto"))
    learner.update(samples[:8], version=0)
    clock = Clock()
    with clock.phase("update"):
        learner.update(samples, version=1)
    return {"settings": how, "seconds": clock.seconds, "peak_gb": clock.peak_gb}


def compared(folder: str, work: Work, phases: Sequence[str], ours: dict[str, float], tokens: int) -> dict[str, Any]:
    """The plain way's seconds over the same work, and how many times ours they are; our iteration holds grading too."""
    plain = run_plain(folder, work, phases, group_tokens=tokens, delta=4)
    ratios = {name: plain["seconds"][name] / ours[f"seconds/{name}"] for name in phases}
    if len(ratios) == len(PHASES):
        ratios["iteration"] = sum(plain["seconds"].values()) / ours["seconds/iteration"]
    return {**plain, "requests": len(work.requests), "samples": len(work.samples), "ratios": ratios}


if __name__ == "__main__":
    sys.modules["iteration"] = sys.modules["__main__"]  # the config names parts of this file
    main()
