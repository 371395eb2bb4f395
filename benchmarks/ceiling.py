"""What a branching rule can gain at most, without a network: real trees and advantages over a policy of a few weights.

    python benchmarks/ceiling.py --json docs/results/ceiling.json      # minutes on one core

A response has S steps of an opening word, which means nothing, and a body; the body of the decisive step is right with
a chance that depends on the problem's count, every other with 99 %. The answer is right if all bodies are. Every choice
is a logistic unit over the same K weights, each with random features of its own, so that what is learned about one
choice disturbs the others, as in a network. Planning, forests and advantages are attnrl's; the update is Adam on the
token-mean policy gradient, two minibatches an iteration. For each rule the best of five rates on other seeds; then
accuracy, which is known exactly, at equal numbers of generated tokens.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from attnrl.algo.adaptive import all_trees
from attnrl.algo.advantages import grpo, tree
from attnrl.algo.forest import plan, plant
from attnrl.algo.rules import RULES
from attnrl.algo.samples import with_signal
from attnrl.types import Group, Prompt, Rollout, Sample, Scores, Step, Trunk, Verdict, as_floats, as_ids

COUNTS, RIGHT_WORK, STEP_TOKENS, GROUP, WIDTH = 11, 0.99, 12, 6, 2
RATES = (0.1, 0.2, 0.4, 0.8, 1.6)
RULES_SHOWN = ("none", "first_steps", "random_steps", "surprisal", "oracle")


@dataclass(frozen=True, slots=True)
class World:
    """The kind of problem: how many steps, where the decision may lie, how good the policy is at first."""

    steps: int = 16
    decisive: tuple[int, int] = (6, 9)
    right: tuple[float, float, float] = (0.75, 0.5, 0.25)  # chance of the right decision, by count modulo 3
    weights: int = 24
    prompts: int = 8
    tokens: int = 300_000


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def logit(p: float) -> float:
    return float(np.log(p / (1.0 - p)))


@dataclass(slots=True)
class Policy:
    """K weights, their features, and Adam's state. The features of a world are the same for every seed of a run."""

    world: World
    rng: np.random.Generator
    weights: np.ndarray = field(init=False)
    features: np.ndarray = field(init=False)  # [openings, work, counts] x K
    bias: np.ndarray = field(init=False)
    mean: np.ndarray = field(init=False)
    square: np.ndarray = field(init=False)
    updates: int = 0

    def __post_init__(self) -> None:
        world, k = self.world, self.world.weights
        drawn = self.rng.normal(size=(world.steps + 1 + COUNTS, k))
        self.features = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
        decisions = [logit(world.right[c % 3]) for c in range(COUNTS)]
        self.bias = np.array([0.0] * world.steps + [logit(RIGHT_WORK)] + decisions)
        self.weights, self.mean, self.square = np.zeros(k), np.zeros(k), np.zeros(k)

    def units(self, count: int, decisive: int) -> np.ndarray:
        """Which unit makes each choice of a response: opening and body of every step."""
        steps = self.world.steps
        bodies = np.full(steps, steps)
        bodies[decisive] = steps + 1 + count
        return np.stack([np.arange(steps), bodies], axis=1).ravel()

    def chances(self, units: np.ndarray) -> np.ndarray:
        return sigmoid(self.bias[units] + self.features[units] @ self.weights)

    def accuracy(self) -> float:
        """Exact, over counts: every other body and the decision right."""
        decisions = self.chances(np.arange(self.world.steps + 1, self.world.steps + 1 + COUNTS))
        work = float(self.chances(np.array([self.world.steps]))[0])
        return float(np.mean(decisions) * work ** (self.world.steps - 1))

    def update(self, samples: list[Sample], rate: float) -> None:
        """One Adam step on the policy gradient, mean over the tokens of the minibatch."""
        gradient = np.zeros_like(self.weights)
        for uid in sorted({s.uid for s in samples}):
            own = [s for s in samples if s.uid == uid]
            units = self.units(*(int(v) for v in own[0].prompt))
            advantages = np.array([s.advantages for s in own])
            chosen = np.array([s.response for s in own])
            gradient += (advantages * (chosen - self.chances(units))).sum(axis=0) @ self.features[units]
        gradient /= max(sum(len(s.response) for s in samples), 1)
        self.updates += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        corrected = self.mean / (1 - 0.9**self.updates)
        self.weights += rate * corrected / (np.sqrt(self.square / (1 - 0.999**self.updates)) + 1e-8)


def rollout(chances: np.ndarray, kept: np.ndarray, rng: np.random.Generator) -> tuple[Rollout, Verdict]:
    """A response, or its tail after the kept choices, and whether the whole is right."""
    chances = chances[len(kept) :]
    drawn = rng.random(len(chances)) < chances
    logprobs = np.log(np.where(drawn, chances, 1.0 - chances))
    right = bool(np.all(np.concatenate([kept, drawn])[1::2]))
    return Rollout(as_ids(drawn), as_floats(logprobs), "stop", 0), Verdict(float(right), "exact")


def cost(choices: int) -> int:
    """Tokens of so many choices: half a step each."""
    return choices * STEP_TOKENS // 2


def iterate(policy: Policy, rule: str, rate: float, rng: np.random.Generator) -> int:
    """One on-policy iteration; returns the tokens it generated."""
    world, spent, samples = policy.world, 0, []
    steps = tuple(Step(2 * k, 2 * k + 2) for k in range(world.steps))
    nothing = as_floats(np.zeros(2 * world.steps))
    for number in range(world.prompts):
        decisive = int(rng.integers(world.decisive[0], world.decisive[1] + 1))
        prompt = Prompt(str(number), as_ids([int(rng.integers(COUNTS)), decisive]), (), row={"decisive": decisive})
        chances = policy.chances(policy.units(*(int(v) for v in prompt.ids)))
        trunks = []
        for _ in range(GROUP * (1 + 2 * WIDTH) if rule == "none" else GROUP):
            drawn, verdict = rollout(chances, np.zeros(0, bool), rng)
            trunks.append(Trunk(drawn, verdict, steps, Scores(drawn.logprobs, nothing, nothing[: len(steps)])))
            spent += cost(len(drawn.ids))
        planned = plan(Group(prompt, tuple(trunks)), rule=RULES[rule], budget=all_trees, trunks=len(trunks), rng=rng)
        grown = []
        for trunk, point in planned.spots:
            kept = trunks[trunk].rollout.ids[:point].astype(bool)
            grown += [rollout(chances, kept, rng) for _ in range(WIDTH)]
        spent += sum(cost(len(r.ids)) for r, _ in grown)
        forest = plant(planned, [r for r, _ in grown], [v for _, v in grown], WIDTH)
        samples += (grpo if rule == "none" else tree)(forest, rng)
    valid = with_signal(samples)
    order = rng.permutation(len(valid))
    for half in (order[0::2], order[1::2]):
        policy.update([valid[i] for i in half], rate)
    return spent


def run(world: World, rule: str, rate: float, seed: int) -> tuple[float, int]:
    """Accuracy once the tokens are spent, and the iterations it took. A seed has the same features for every rule."""
    policy, rng = Policy(world, np.random.default_rng(seed)), np.random.default_rng(1000 + seed)
    spent = iterations = 0
    while spent < world.tokens:
        spent += iterate(policy, rule, rate, rng)
        iterations += 1
    return policy.accuracy(), iterations


def compare(world: World, seeds: int, tuning: int) -> dict[str, dict[str, object]]:
    """For each rule: its best rate on the tuning seeds, and its accuracies on others."""
    found: dict[str, dict[str, object]] = {}
    for rule in RULES_SHOWN:
        sweep = {r: float(np.mean([run(world, rule, r, 500 + s)[0] for s in range(tuning)])) for r in RATES}
        best = max(sweep, key=lambda r: sweep[r])
        runs = [run(world, rule, best, seed) for seed in range(seeds)]
        found[rule] = {
            "rate": best,
            "sweep": sweep,
            "accuracy": [accuracy for accuracy, _ in runs],
            "iterations": float(np.mean([n for _, n in runs])),
        }
        print(rule, best, f"{100 * np.mean(found[rule]['accuracy']):.1f}", found[rule]["iterations"], flush=True)
    return found


WORLDS = {
    "decision at 2 to 4 of 16": World(decisive=(2, 4)),
    "decision at 6 to 9 of 16": World(decisive=(6, 9)),
    "decision at 11 to 13 of 16": World(decisive=(11, 13)),
    "decision at 26 to 29 of 32": World(steps=32, decisive=(26, 29)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--tuning", type=int, default=4)
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    args = parser.parse_args()
    answer = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}  # other worlds stay
    for name in args.worlds:
        print(name, flush=True)
        start = Policy(WORLDS[name], np.random.default_rng(0)).accuracy()
        answer[name] = {"before": start, "rules": compare(WORLDS[name], args.seeds, args.tuning)}
        if args.json:
            args.json.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
