"""How far the sampler's log-probs lie from the learner's, and which switches bring them nearer. JSON.

    python benchmarks/agreement.py --model DIR --out a.json                # a trained model
    python benchmarks/agreement.py --shape 1.5B --peak 6 --out a.json      # random weights, sure of their words
    python benchmarks/agreement.py --shape tiny --device cpu --prompts 4 --tokens 16 --out a.json  # a rehearsal

The engine of a run draws responses to made-up problems and its learner updates on them, with advantages of either sign
and a learning rate that moves nothing, so that all there is between the two is rounding. For each sampler and with
logits in float32 or not (`engine.local.float32_logits`):
mean, largest       |log-prob of the sampler - of the learner| of a token; plain_: of the model's own forward
behaviour_kl, ratio_max, clip_fraction   metrics of the update; clipped tokens teach nothing, though nothing has moved
and the same metrics with `importance_cap`, which measures ratios from the learner's own log-probs and weighs tokens.
vLLM draws once: its logits do not depend on ours.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnrl.config import Config, load_config
from attnrl.data.prompts import render_prompts
from attnrl.data.tasks import as_records
from attnrl.local.backend import LocalBackend, build
from attnrl.local.learner import Learner
from attnrl.local.models import load_tokenizer, load_weights
from attnrl.policy.objective import objective
from attnrl.policy.packing import microbatches, pack
from attnrl.types import Request, Sample, Sampling, as_floats
from iteration import SHAPES, free, make_model
from record import record, write

CAP = 2.0
METRICS = ("behaviour_kl", "ratio_max", "clip_fraction", "importance_weight", "entropy")


def settings(folder: Path, args: argparse.Namespace, sampler: str, wide: bool) -> Config:
    """Those of the preset, one minibatch and no reference; log-probs are the same for any microbatch."""
    return load_config(
        "attnrl_1p5b",
        {
            "model.path": str(folder),
            "model.dtype": "bfloat16",
            "engine.local.device": args.device,
            "engine.local.sampler": sampler,
            "engine.local.float32_logits": wide,
            "engine.local.rows": args.prompts * args.group,
            "data.max_prompt_tokens": 512,
            "sampling.max_response_tokens": args.tokens,
            "update.lr": 1e-30,
            "update.weight_decay": 0.0,
            "update.kl_weight": 0.0,
            "update.minibatches": 1,
        },
    )


def sharpen(folder: Path, factor: float) -> None:
    """Random weights give logits around 0; scaled, they are some tens, as a trained model's."""
    model = load_weights(folder, device="cpu", dtype="bfloat16", float32_logits=False)
    with torch.no_grad():
        model.base_model.norm.weight.mul_(factor)
    model.save_pretrained(folder)


def draw(engine: LocalBackend, folder: Path, args: argparse.Namespace) -> list[Sample]:
    """Responses of the engine as samples, with advantages of either sign."""
    records = as_records(load_config("").data.tasks, "train", args.prompts)
    prompts, _ = render_prompts(records, load_tokenizer(folder), template="{problem}", max_prompt_tokens=512)
    requests = [Request(p.ids, args.tokens, seed=i) for i, p in enumerate(prompts * args.group)]
    rollouts = engine.generate(requests, Sampling())
    rng = np.random.default_rng(0)
    return [
        Sample(request.context, r.ids, as_floats(np.full(len(r.ids), rng.choice((-1.0, 1.0)))), r.logprobs, str(i))
        for i, (request, r) in enumerate(zip(requests, rollouts, strict=True))
    ]


def compared(engine: LocalBackend, samples: list[Sample]) -> dict[str, float]:
    """Gaps of log-probs, and metrics of updates without and with importance weights."""
    learner = engine.learner
    assert learner is not None
    drawn = np.concatenate([s.logprobs for s in samples])
    found = {"tokens": float(len(drawn)), "surprisal": float(-drawn.mean())}
    for name, fused in (("", True), ("plain_", False)):
        gap = np.abs(drawn - learned(learner, samples, fused))
        found |= {f"{name}mean": float(gap.mean()), f"{name}largest": float(gap.max())}
    metrics = learner.update(samples, version=0)
    found |= {"fused": metrics["train/fused"]} | {name: metrics[f"policy/{name}"] for name in METRICS}
    capped = learner.options.model_copy(update={"importance_cap": CAP})
    learner.passes = replace(learner.passes, options=capped, objective=objective(capped))
    metrics = learner.update(samples, version=0)
    return found | {f"capped_{name}": metrics[f"policy/{name}"] for name in METRICS}


def learned(learner: Learner, samples: list[Sample], fused: bool) -> np.ndarray:
    """The learner's log-probs of the samples' tokens, one after another."""
    budget = learner.options.microbatch_tokens
    decoder = learner.decoders.get(id(learner.model)) if fused else None
    rows: dict[int, np.ndarray] = {}
    for indices in microbatches(samples, list(range(len(samples))), budget, share=False):
        laid_out = pack(samples, indices, learner.device)
        parts = learner.passes.logprobs(learner.hf, laid_out, fused=decoder).split(list(laid_out.counts))
        rows |= {row: part.float().cpu().numpy() for row, part in zip(laid_out.rows, parts, strict=True)}
    return np.concatenate([rows[i] for i in range(len(samples))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a trained model")
    parser.add_argument(
        "--shape", choices=SHAPES, default="1.5B", help="of a model with random weights, without --model"
    )
    parser.add_argument("--peak", type=float, default=1.0, help="its logits times this")
    parser.add_argument("--tokenizer", default=None, help="its tokenizer's folder; default: that of made-up tasks")
    parser.add_argument("--samplers", default="own", help="of own, vllm")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=4, help="responses to each")
    parser.add_argument("--tokens", type=int, default=256, help="of a response, at most")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("agreement.json"), help="JSON")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    found = record(args, rows=rows)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(args.model or made)
        if not args.model:
            make_model(args.shape, args.tokenizer, folder)
            if args.peak != 1:
                sharpen(folder, args.peak)
        for sampler in args.samplers.split(","):
            samples: list[Sample] = []
            for wide in (True, False):
                name = "own" if samples and sampler == "vllm" else sampler
                config = settings(folder, args, name, wide)
                engine = build(config, model=str(folder), tokenizer=load_tokenizer(folder))
                samples = samples if name != sampler else draw(engine, folder, args)
                engine.sampler.rest()
                rows.append({"sampler": sampler, "float32_logits": wide, **compared(engine, samples)})
                print(json.dumps(rows[-1]), flush=True)
                write(args, found)
                engine.close()
                del engine
                free()


if __name__ == "__main__":
    main()
