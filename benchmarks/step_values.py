"""What each step is worth, measured: many branches from every step of a trunk, and which rules find the decisive steps.

    PYTHONPATH=benchmarks attnrl train s_treerl --run-dir runs/values --algo.rule step_values:every_step \\
      --algo.width 16 --algo.group 2 --algo.prompts 48 --update.lr 1e-9 \\
      --run.iterations 1 --evaluation.every 0 --run.save_rollouts_every 1
    python benchmarks/step_values.py runs/values --json docs/results/s_values.json

The value of a step's start is the mean reward of the branches drawn there (the trunk's own end after the last step). A
step's effect is the value after it minus the value before it, from two halves of the branches, so that the product of
the halves estimates the squared effect without the bias of sampling noise. Reads the forests of iteration 1 alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from attnrl.algo.branching import candidates
from attnrl.algo.parts import reads
from attnrl.algo.position import position_null
from attnrl.algo.rules import RULES
from attnrl.types import Prompt, Rollout, Scores, Step, Trunk, Verdict, as_floats, as_ids
from evidence_forests import DECISIVE, rank_correlation, ranks

RULES_SHOWN: dict[str, tuple[str, dict[str, float]]] = {
    "fci": ("fci", {}),
    "fci, top 10 %": ("fci", {"top_fraction": 0.1}),
    "fci, top 40 %": ("fci", {"top_fraction": 0.4}),
    **{
        n: (n, {})
        for n in (
            "fci_residual",
            "fci_ratio",
            "fci_mean",
            "surprisal",
            "step_entropy",
            "random_steps",
            "first_steps",
            "oracle",
        )
    },
}
DELTA = 4


@reads("entropy", "fci")
def every_step(prompt: Prompt, trunk: Trunk, rng: np.random.Generator) -> tuple[int, ...]:
    """The start of every step that may be a branch point; a rule of one's own, so the trunk is scored."""
    return tuple(trunk.steps[k].start for k in candidates(trunk.steps))


@dataclass(frozen=True, slots=True)
class Valued:
    """A trunk with the squared effect of each of its steps but the first; nan where a value is missing."""

    uid: str
    prompt: Prompt
    trunk: Trunk
    effect: np.ndarray  # [S] unbiased estimate of the squared effect
    values: np.ndarray  # [S + 1] value of the start of each step, and of the end
    decisive: tuple[int, ...]


def read_values(run_dir: Path, prompt_tokens: int) -> list[Valued]:
    rows = pq.read_table(run_dir / "forests" / "000001.parquet").to_pylist()
    rewards: dict[tuple[str, int], dict[int, list[float]]] = {}
    for row in rows:
        if row["kind"] == "branch":
            rewards.setdefault((row["uid"], row["tree"]), {}).setdefault(row["point"], []).append(row["reward"])
    return [
        valued(row, rewards.get((row["uid"], row["tree"]), {}), prompt_tokens) for row in rows if row["kind"] == "trunk"
    ]


def valued(row: dict[str, Any], rewards: dict[int, list[float]], prompt_tokens: int) -> Valued:
    starts = [*row["step_starts"], len(row["ids"])]
    steps = tuple(Step(a, b) for a, b in pairwise(starts))
    halves = np.full((2, len(steps) + 1), np.nan)
    for k, start in enumerate(starts[:-1]):
        if start in rewards:
            halves[:, k] = [np.mean(rewards[start][0::2]), np.mean(rewards[start][1::2])]
    halves[:, -1] = row["reward"]
    change = np.diff(halves, axis=1)
    named = [k for k, text in enumerate(row["step_texts"]) if DECISIVE in text]
    prompt = Prompt(row["uid"], as_ids(np.zeros(prompt_tokens)), (), row={"decisive": named})
    rollout = Rollout(as_ids(row["ids"]), as_floats(row["logprobs"]), row["finish"], 0)
    scores = Scores(rollout.logprobs, as_floats(row["entropy"]), as_floats(row["fci"]))
    trunk = Trunk(rollout, Verdict(row["reward"], row["rule"]), steps, scores)
    return Valued(row["uid"], prompt, trunk, change[0] * change[1], halves.mean(axis=0), tuple(named))


def correlations(trunk: Valued) -> dict[str, float]:
    """Rank correlations over the steps of one trunk that FCI can score."""
    steps = [
        k for k in candidates(trunk.trunk.steps) if k < len(trunk.trunk.steps) - DELTA and np.isfinite(trunk.effect[k])
    ]
    effect = trunk.effect[steps]
    fci = trunk.trunk.scores.fci[steps]
    entropy = [
        float(np.mean(trunk.trunk.scores.entropy[s.start : s.stop])) for s in (trunk.trunk.steps[k] for k in steps)
    ]
    null = position_null(len(trunk.prompt.ids), trunk.trunk.steps, DELTA)[steps]
    return {
        "effect, FCI": rank_correlation(effect, fci),
        "effect, FCI; position held": partial(effect, fci, steps),
        "effect, position": rank_correlation(effect, steps),
        "effect, entropy of the step": rank_correlation(effect, entropy),
        "FCI, position": rank_correlation(fci, steps),
        "FCI, position null": rank_correlation(fci, null),
    }


def lift(trunk: Valued) -> dict[int, float]:
    """FCI over its position null, of the steps that may be branch points and have one."""
    null = position_null(len(trunk.prompt.ids), trunk.trunk.steps, DELTA)
    allowed = candidates(trunk.trunk.steps)
    return {k: float(trunk.trunk.scores.fci[k] / null[k]) for k in allowed if null[k] > 0.0}


def partial(first: Sequence[float], second: Sequence[float], held: Sequence[float]) -> float:
    """Rank correlation of two with the ranks of a third taken out of both."""
    a, b, c = (ranks(np.asarray(values, dtype=float)) for values in (first, second, held))
    if min(len(a), 3) < 3 or not c.std():
        return 0.0
    left = [v - np.polyval(np.polyfit(c, v, 1), c) for v in (a, b)]
    if min(v.std() for v in left) < 1e-9:
        return 0.0
    return float(np.corrcoef(*left)[0, 1])


def rule_rows(trunks: Sequence[Valued]) -> dict[str, dict[str, float]]:
    """Of each rule's points: how often one is the decisive step, how many lie not after it, their squared effect."""
    found = {}
    rng = np.random.default_rng(0)
    for name, (rule, options) in RULES_SHOWN.items():
        hits, places, effects, first = [], [], [], []
        for t in trunks:
            points = RULES[rule](t.prompt, t.trunk, rng, points=2, **options)
            starts = [s.start for s in t.trunk.steps]
            steps = [int(np.searchsorted(starts, p, side="right") - 1) for p in points]  # the step a token lies in
            if not t.decisive or not steps:
                continue
            hits.append(bool(set(t.decisive) & set(steps)))
            places += [k <= t.decisive[-1] for k in steps]
            first.append(sorted(set(steps)) == [1, 2])
            effects += [t.effect[k] for k in steps if np.isfinite(t.effect[k])]
        found[name] = {
            "a decisive step among the points": float(np.mean(hits)),
            "points not after the last": float(np.mean(places)),
            "points are the first steps": float(np.mean(first)),
            "mean squared effect": float(np.mean(effects)),
        }
    return found


def interval(values: Sequence[float], groups: Sequence[str]) -> list[float]:
    """Mean and 95 % bootstrap interval over prompts."""
    by: dict[str, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        by.setdefault(group, []).append(value)
    means = np.array([np.mean(v) for v in by.values()])
    drawn = np.random.default_rng(0).choice(means, (4000, len(means))).mean(axis=1)
    return [float(np.mean(means)), *(float(q) for q in np.quantile(drawn, (0.025, 0.975)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--prompt-tokens", type=int, default=119, help="mean length of the prompts, for the position null"
    )
    args = parser.parse_args()
    trunks = read_values(args.run, args.prompt_tokens)
    per_trunk = [correlations(t) for t in trunks]
    answer = {
        "trunks": len(trunks),
        "prompts": len({t.uid for t in trunks}),
        "accuracy": float(np.mean([t.trunk.reward for t in trunks])),
        "squared effect": {
            "decisive step": float(np.nanmean([t.effect[k] for t in trunks for k in t.decisive])),
            "other steps": float(
                np.nanmean([e for t in trunks for k, e in enumerate(t.effect[1:], 1) if k not in t.decisive])
            ),
        },
        "FCI over its position null": {
            "decisive steps": float(np.mean([r for t in trunks for k, r in lift(t).items() if k in t.decisive])),
            "other steps": float(np.mean([r for t in trunks for k, r in lift(t).items() if k not in t.decisive])),
        },
        "correlations": {
            name: interval([c[name] for c in per_trunk], [t.uid for t in trunks]) for name in per_trunk[0]
        },
        "rules": rule_rows(trunks),
    }
    print(json.dumps(answer, indent=1))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
