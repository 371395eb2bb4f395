"""How good the values of a tree's nodes are, by branching rule: each against 64 further rollouts from the same place.

    PYTHONPATH=benchmarks attnrl train s_treerl --run-dir runs/nodes --algo.rule node_values:every_rule \\
      --algo.estimator node_values:nothing --algo.width 66 --algo.group 1 --algo.prompts 4 --run.iterations 8 \\
      --run.save_rollouts_every 1 --evaluation.every 0
    python benchmarks/node_values.py runs/nodes --json docs/results/s_nodes.json

Every rule chooses its two points of the same trunks. Of the branches at a point the first two make the tree, the rest
say what the value is. A tree has two inner nodes: the text before its first point, over all five leaves, and the text
between its points, over three. With V a node's value in the tree (Eq. 2), T the mean of the n further rollouts and
t = T(1 - T)/(n - 1) the sampling variance of T, V - T estimates the bias of V and (V - T)^2 - t its squared error; the
variance is the squared error less the squared bias. No update is made, so every iteration has the same policy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from attnrl.algo.parts import reads
from attnrl.algo.rules import RULES
from attnrl.types import Forest, Prompt, Sample, Trunk
from step_values import interval

COMPARED = ("fci", "surprisal", "random_steps", "fci_residual", "oracle")
POINTS, WIDTH = 2, 2  # of the tree whose values are judged


@reads("logprobs", "fci")
def every_rule(prompt: Prompt, trunk: Trunk, rng: np.random.Generator) -> tuple[int, ...]:
    """The points of all rules, one rule after the other; none where some rule has too few."""
    chosen = [sorted(RULES[name](prompt, trunk, rng, points=POINTS)) for name in COMPARED]
    return tuple(p for points in chosen for p in points) if all(len(p) == POINTS for p in chosen) else ()


def nothing(forest: Forest, rng: np.random.Generator) -> list[Sample]:
    """No samples: the policy stays as it is."""
    return []


@dataclass(frozen=True, slots=True)
class Node:
    """An inner node of a tree: its value there, the mean of n further rollouts, and that mean's sampling variance."""

    uid: str
    first: bool  # the text before the first point, or that between the two
    value: float
    truth: float
    noise: float
    leaves: int

    @property
    def error(self) -> float:
        return self.value - self.truth

    @property
    def squared_error(self) -> float:
        return self.error**2 - self.noise


def nodes(uid: str, trunk: float, first: Sequence[float], second: Sequence[float]) -> list[Node]:
    """The two inner nodes of a tree: `first` and `second` are the rewards of all branches at its points, in order.

    >>> [round(n.value, 3) for n in nodes("q", 1.0, [0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0])]
    [0.8, 1.0]
    """
    leaves = [trunk, *first[:WIDTH], *second[:WIDTH]]
    return [node(uid, True, leaves, first[WIDTH:]), node(uid, False, [trunk, *second[:WIDTH]], second[WIDTH:])]


def node(uid: str, first: bool, leaves: Sequence[float], further: Sequence[float]) -> Node:
    truth = float(np.mean(further))
    return Node(uid, first, float(np.mean(leaves)), truth, truth * (1 - truth) / (len(further) - 1), len(leaves))


def read_nodes(run_dir: Path) -> dict[str, list[Node]]:
    """rule -> the inner nodes of its trees, over all recorded iterations."""
    found: dict[str, list[Node]] = {name: [] for name in COMPARED}
    for file in sorted((run_dir / "forests").glob("*.parquet")):
        rows = pq.read_table(file, columns=["uid", "tree", "kind", "reward"]).to_pylist()
        trees: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for row in rows:
            trees.setdefault((row["uid"], row["tree"]), []).append(row)
        for (uid, _), (trunk, *branches) in trees.items():
            if not branches:
                continue
            at = np.array([b["reward"] for b in branches]).reshape(len(COMPARED), POINTS, -1)
            for name, (first, second) in zip(COMPARED, at.tolist(), strict=True):
                found[name] += nodes(f"{file.stem}/{uid}", trunk["reward"], first, second)
    return found


def quality(judged: Sequence[Node]) -> dict[str, Any]:
    """Bias with its 95 % interval over prompts, variance, and as many independent rollouts as would have that variance.

    `true spread` is the variance of the true values among the nodes: what there is to tell apart.
    """
    bias = interval([n.error for n in judged], [n.uid for n in judged])
    variance = float(np.mean([n.squared_error for n in judged])) - bias[0] ** 2
    single = float(np.mean([n.truth * (1 - n.truth) + n.noise for n in judged]))  # variance of one rollout's reward
    spread = float(np.var([n.truth for n in judged]) - np.mean([n.noise for n in judged]))
    return {
        "nodes": len(judged),
        "true value": float(np.mean([n.truth for n in judged])),
        "bias": bias,
        "variance": variance,
        "leaves": float(np.mean([n.leaves for n in judged])),
        "worth of leaves": single / variance,
        "true spread": spread,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = read_nodes(args.run)
    answer = {
        rule: {
            "before the first point": quality([n for n in judged if n.first]),
            "between the points": quality([n for n in judged if not n.first]),
        }
        for rule, judged in found.items()
    }
    print(json.dumps(answer, indent=1))
    if args.json:
        args.json.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
