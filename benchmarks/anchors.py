"""FCI on real chains of thought whose sentences have a measured importance: does it say more than position?

    ATTNRL_DATA=... python benchmarks/anchors.py score MODEL_DIR --gguf FILE --output docs/results/anchors/scores.jsonl
    ATTNRL_DATA=... python benchmarks/anchors.py tables docs/results/anchors/scores.jsonl \\
      --json docs/results/anchors_values.json

Reads transcripts/thought_anchors_40_traces.json.gz under ATTNRL_DATA: 40 traces of R1-distilled models in sentence
chunks, each chunk with its importance by resampling from it (`counterfactual_importance_kl` and others, made by the
data set's authors). MODEL_DIR is any Hugging Face decoder, here a small one: its attention is not that of the models
that wrote the traces. Scoring appends a line a trace, shortest first, and goes on where it stopped.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from attnrl.algo.branching import candidates
from attnrl.algo.position import position_null
from attnrl.algo.rules import RULES
from attnrl.types import Prompt, Rollout, Scores, Step, Trunk, Verdict, as_floats, as_ids
from evidence_forests import rank_correlation, ranks
from step_values import interval, partial

DELTA = 4
MEASURES = {
    "importance by counterfactual resampling, KL": "counterfactual_importance_kl",
    "importance by resampling, KL": "resampling_importance_kl",
    "change of accuracy by resampling, absolute": "resampling_importance_accuracy",
}
RULES_SHOWN: dict[str, tuple[str, dict[str, float]]] = {
    "fci": ("fci", {}),
    "fci, top 10 %": ("fci", {"top_fraction": 0.1}),
    "fci, top 2 %": ("fci", {"top_fraction": 0.02}),
    **{name: (name, {}) for name in ("fci_residual", "fci_mean", "first_steps", "random_steps")},
}


def traces() -> list[dict[str, Any]]:
    file = Path(os.environ["ATTNRL_DATA"]) / "transcripts" / "thought_anchors_40_traces.json.gz"
    with gzip.open(file) as text:
        found: list[dict[str, Any]] = json.load(text)
    return sorted(found, key=lambda trace: len(trace["solution"]))


def score(args: argparse.Namespace) -> None:
    """Appends FCI of every chunk of every trace that the output does not have yet."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from attnrl.scoring import fci

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, gguf_file=args.gguf)
    model = AutoModelForCausalLM.from_pretrained(args.model, gguf_file=args.gguf, dtype=torch.float32).eval()
    done = (
        {json.loads(line)["path"] for line in args.output.read_text().splitlines()} if args.output.exists() else set()
    )
    for trace in traces():
        if trace["path"] in done:
            continue
        prompt = tokenizer(trace["prompt"] + "\n", add_special_tokens=False)["input_ids"]
        pieces = [tokenizer(" " + c["chunk"], add_special_tokens=False)["input_ids"] for c in trace["chunks"]]
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        if len(prompt) + ends[-1] > args.longest:
            continue
        spans = [(len(prompt) + b - len(p), len(prompt) + b) for p, b in zip(pieces, ends, strict=True)]
        with torch.no_grad():
            scores = fci(model, np.array(prompt + [i for p in pieces for i in p]), spans, delta=DELTA)
        row = {"path": trace["path"], "prompt": len(prompt), "ends": ends, "fci": [float(v) for v in scores]}
        with args.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(trace["path"], len(prompt) + ends[-1], flush=True)


def as_trunk(row: dict[str, Any]) -> tuple[Prompt, Trunk]:
    ends = row["ends"]
    steps = tuple(Step(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True))
    rollout = Rollout(as_ids(np.zeros(ends[-1])), as_floats(np.zeros(ends[-1])), "stop", 0)
    scores = Scores(rollout.logprobs, as_floats(np.zeros(ends[-1])), as_floats(row["fci"]))
    return Prompt(row["path"], as_ids(np.zeros(row["prompt"])), ()), Trunk(rollout, Verdict(1.0, "none"), steps, scores)


def importance(trace: dict[str, Any], key: str) -> np.ndarray:
    return np.abs(np.array([chunk.get(key) or 0.0 for chunk in trace["chunks"]], dtype=float))


def tables(args: argparse.Namespace) -> None:
    """Correlations over the chunks of a trace, and how important the chunks are that each rule branches at."""
    known = {trace["path"]: trace for trace in traces()}
    rows = [json.loads(line) for line in args.scores.read_text().splitlines()]
    names = [row["path"] for row in rows]
    found: dict[str, list[float]] = {}
    for row in rows:
        prompt, trunk = as_trunk(row)
        steps = [k for k in candidates(trunk.steps) if k < len(trunk.steps) - DELTA]
        fci, null = trunk.scores.fci[steps], position_null(len(prompt.ids), trunk.steps, DELTA)[steps]
        found.setdefault("FCI, position", []).append(rank_correlation(fci, steps))
        for title, key in MEASURES.items():
            measure = importance(known[row["path"]], key)[steps]
            found.setdefault(f"{title}; FCI", []).append(rank_correlation(measure, fci))
            found.setdefault(f"{title}; FCI, position held", []).append(partial(measure, fci, steps))
            found.setdefault(f"{title}; FCI over its null", []).append(rank_correlation(measure, fci / null))
            found.setdefault(f"{title}; position", []).append(rank_correlation(measure, steps))
    answer = {
        "traces": len(rows),
        "chunks": {"median": float(np.median([len(r["ends"]) for r in rows]))},
        "tokens": {"median": float(np.median([r["prompt"] + r["ends"][-1] for r in rows]))},
        "correlations": {name: interval(values, names) for name, values in found.items()},
        "rules": {name: rule_row(rule, options, rows, known) for name, (rule, options) in RULES_SHOWN.items()},
    }
    print(json.dumps(answer, indent=1))
    if args.json:
        args.json.write_text(json.dumps(answer, indent=1) + "\n")


def rule_row(
    rule: str, options: dict[str, float], rows: list[dict[str, Any]], known: dict[str, Any]
) -> dict[str, float]:
    """Shares of first steps, place of the points, and the mean percentile of their importance within the trace."""
    rng = np.random.default_rng(0)
    first, places, percentiles = [], [], []
    for row in rows:
        prompt, trunk = as_trunk(row)
        starts = [step.start for step in trunk.steps]
        measure = ranks(importance(known[row["path"]], "counterfactual_importance_kl")) / (len(starts) - 1)
        for _ in range(50 if rule == "random_steps" else 1):
            steps = [starts.index(point) for point in RULES[rule](prompt, trunk, rng, points=2, **options)]
            first.append(steps == [1, 2])
            places += [trunk.steps[k].start / trunk.steps[-1].stop for k in steps]
            percentiles += [100 * measure[k] for k in steps]
    return {
        "points are the first steps": float(np.mean(first)),
        "mean place of the points": float(np.mean(places)),
        "percentile of their importance": float(np.mean(percentiles)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    scoring = verbs.add_parser("score")
    scoring.add_argument("model", type=Path)
    scoring.add_argument("--gguf")
    scoring.add_argument("--output", type=Path, required=True)
    scoring.add_argument("--longest", type=int, default=6000, help="tokens; longer traces are left out")
    scoring.add_argument("--threads", type=int, default=1)
    shown = verbs.add_parser("tables")
    shown.add_argument("scores", type=Path)
    shown.add_argument("--json", type=Path)
    args = parser.parse_args()
    score(args) if args.verb == "score" else tables(args)


if __name__ == "__main__":
    main()
