"""Made-up run directories, written by the code that writes real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnrl.algo.advantages import ESTIMATORS
from attnrl.algo.statistics import forest_statistics, generation_statistics, group_statistics, sample_statistics
from attnrl.config import Config
from attnrl.run import Run, open_run
from attnrl.types import (
    Branch,
    Forest,
    Group,
    Ids,
    Prompt,
    Rollout,
    Scores,
    Step,
    Tree,
    Trunk,
    Verdict,
    as_floats,
    as_ids,
)

WORDS = ("so", "the", "box", "holds", "three", "red", "coins", "and", "twice", "as", "many", "makes", "nine", "in all")


def decode(ids: Ids) -> str:
    """A few words; token 0 is a blank line."""
    return "".join("\n\n" if i == 0 else f" {WORDS[i % len(WORDS)]}" for i in ids.tolist())


def rollout(rng: np.random.Generator, tokens: int, version: int) -> Rollout:
    ids = rng.integers(1, 200, tokens)
    ids[11::12] = 0
    return Rollout(as_ids(ids), as_floats(-rng.exponential(0.4, tokens)), "stop", version)


def make_forest(rng: np.random.Generator, number: int, skill: float, version: int, *, branches: bool = True) -> Forest:
    trees = []
    for t in range(4):
        drawn = rollout(rng, int(rng.integers(60, 120)), version)
        starts = list(range(0, len(drawn.ids), 12))
        steps = tuple(Step(a, b) for a, b in zip(starts, [*starts[1:], len(drawn.ids)], strict=True))
        fci = rng.gamma(1.5, 0.02, len(steps)) * np.linspace(1.4, 0.6, len(steps))
        fci[-4:] = 0.0
        scores = Scores(drawn.logprobs, as_floats(rng.exponential(0.5, len(drawn.ids))), as_floats(fci))
        trunk = Trunk(drawn, verdict(rng, skill), steps, scores)
        points = sorted(starts[i] for i in np.argsort(-fci[1:-4])[:2] + 1) if branches and t < 3 else []
        grown = [Branch(p, rollout(rng, len(drawn.ids) - p, version + 1), verdict(rng, skill)) for p in points * 2]
        trees.append(Tree(trunk, tuple(sorted(grown, key=lambda b: b.point))))
    problem = f"All coins are alike, and no box is empty. Problem {number}: how many coins does the box hold?"
    return Forest(Prompt(f"uid{number:04d}", as_ids([1, 2, 3]), ("9",), problem), tuple(trees))


def verdict(rng: np.random.Generator, skill: float) -> Verdict:
    right = bool(rng.random() < skill)
    return Verdict(float(right), "number", "9" if right else str(int(rng.integers(10, 99))))


def log_iteration(run: Run, rng: np.random.Generator, i: int, n: int, gain: float, estimator: str) -> None:
    """One iteration of a made-up run that learns: forests, and the metrics training would log for them."""
    skill = 0.25 + gain * i / n
    forests = [make_forest(rng, 100 * i + f, skill, i, branches=estimator != "grpo") for f in range(6)]
    groups = [Group(f.prompt, tuple(t.trunk for t in f.trees)) for f in forests]
    samples = [s for f in forests for s in ESTIMATORS[estimator](f, rng)]
    rollouts = [t.trunk.rollout for f in forests for t in f.trees]
    noise = rng.normal(0.0, 0.05, 4)
    metrics = {
        "iteration": float(i),
        "batch/prompts": 6.0 + i // 9,
        "batch/size": 6.0 + i / 9,
        "batch/filtered_share": float(np.clip(0.1 + 0.3 * i / n + noise[0], 0, 1)),
        "policy/version": float(i),
        **group_statistics(groups),
        **forest_statistics(forests),
        **generation_statistics(rollouts),
        **sample_statistics(samples, samples),
        "policy/loss": -0.01 + 0.1 * float(noise[1]),
        "policy/kl": 0.02 * i / n + 0.002 * abs(float(noise[2])),
        "policy/behaviour_kl": 0.002 * abs(float(noise[1])),
        "policy/entropy": 0.6 - 0.3 * i / n + float(noise[2]) / 4,
        "policy/clip_fraction": 0.01 + abs(float(noise[3])) / 9,
        "policy/grad_norm": 0.5 + abs(float(noise[3])),
        "policy/lr": 1e-5,
        "seconds/generate": 2.0 + float(noise[0]),
        "seconds/verify": 0.2,
        "seconds/score": 0.5 if estimator == "tree" else 0.01,
        "seconds/update": 1.1 + float(noise[1]),
    }
    metrics["seconds/iteration"] = sum(v for k, v in metrics.items() if k.startswith("seconds/"))
    metrics["generate/total_tokens"] = i * 9000.0
    if i % max(n // 4, 1) == 0 or i == n:
        metrics |= evaluation(0.25 + gain * i / n)
    run.log(metrics)
    if i in (1, n // 2, n):
        run.save_forests(i, forests, decode)


def evaluation(accuracy: float) -> dict[str, float]:
    return {
        "eval/tasks/pass@1": accuracy,
        "eval/tasks/pass@1_low": accuracy - 0.04,
        "eval/tasks/pass@1_high": accuracy + 0.05,
        "eval/tasks/length": 100.0 + 5 * accuracy,
        "eval/tasks/truncated_share": 0.01,
    }


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """Writes a made-up run directory and answers its path."""

    def make(path: Path, *, iterations: int = 8, seed: int = 0, gain: float = 0.3, **algo: Any) -> Path:
        config = Config.model_validate({"about": "a made-up run", "algo": algo}).model_dump(mode="json")
        config["run"]["iterations"] = iterations
        run = open_run(path, config, resume=False)
        rng = np.random.default_rng(seed)
        run.log({"iteration": 0.0, **evaluation(0.25)})
        for i in range(1, iterations + 1):
            log_iteration(run, rng, i, iterations, gain, algo.get("estimator", "tree"))
        return path

    return make
