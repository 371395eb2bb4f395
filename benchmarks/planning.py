"""Time and memory of the algorithm itself for one full iteration, on one core, as JSON.

    python benchmarks/planning.py [--prompts 64] [--tokens 8192] [--repeats 5] [--output FILE]

Six trunks a prompt, two branch points each, two branches a point: 30 leaves. Every trunk has `tokens` tokens in steps
of about 40, every branch fills the response limit. Timed: filter, plan, requests, whole responses, planting, advantages
and the choice of samples with signal, in seconds of processor time (one thread); segmentation of the trunks is timed
beside it. Memory is the peak that Python and numpy allocate on top of the given trunks and rollouts, at a quarter, a
half and all of the tokens.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: one core

import argparse
import json
import platform
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from attnrl.algo.adaptive import all_trees, attention_filter
from attnrl.algo.advantages import ESTIMATORS
from attnrl.algo.branching import fci
from attnrl.algo.forest import Plan, branch_requests, plan, plant, whole_responses
from attnrl.algo.samples import with_signal
from attnrl.algo.steps import blank_lines
from attnrl.types import Floats, Forest, Group, Prompt, Rollout, Sample, Scores, Trunk, Verdict, as_floats, as_ids

GROUP, POINTS, WIDTH, STEP_TOKENS = 6, 2, 2, 40


def token_texts(rng: np.random.Generator, tokens: int) -> list[str]:
    """Texts of a response's tokens; one token in about forty ends a paragraph."""
    ends = rng.random(tokens) < 1.0 / STEP_TOKENS
    return [".\n\n" if end else " word" for end in ends]


def some_logprobs(rng: np.random.Generator, tokens: int) -> Floats:
    return as_floats(-rng.exponential(0.3, tokens))


def make_groups(rng: np.random.Generator, prompts: int, tokens: int) -> list[Group]:
    """Scored trunks with random outcomes."""
    groups = []
    for number in range(prompts):
        trunks = []
        for _ in range(GROUP):
            rollout = Rollout(as_ids(rng.integers(0, 150_000, tokens)), some_logprobs(rng, tokens), "stop", 0)
            steps = blank_lines(token_texts(rng, tokens))
            scores = Scores(rollout.logprobs, some_logprobs(rng, tokens), as_floats(rng.exponential(1.0, len(steps))))
            trunks.append(Trunk(rollout, Verdict(float(rng.random() < 0.5), "number"), steps, scores))
        groups.append(Group(Prompt(str(number), as_ids(np.arange(200)), ("1",)), tuple(trunks)))
    return groups


def make_plans(groups: list[Group]) -> list[Plan]:
    rng = np.random.default_rng(1)
    kept, _, _ = attention_filter(groups, scope="none")
    rule = partial(fci, points=POINTS)
    return [plan(group, rule=rule, budget=all_trees, rng=rng) for group in kept]


def draw_branches(rng: np.random.Generator, plans: list[Plan], tokens: int) -> list[list[Rollout]]:
    """What a generation call would return for the plans' requests."""
    drawn = []
    for planned in plans:
        requests = branch_requests(planned, width=WIDTH, max_tokens=tokens, rng=rng)
        drawn.append(
            [
                Rollout(as_ids(rng.integers(0, 150_000, r.max_tokens)), some_logprobs(rng, r.max_tokens), "stop", 1)
                for r in requests
            ]
        )
    return drawn


def planning(groups: list[Group], tokens: int) -> None:
    """Everything before the generation call."""
    rng = np.random.default_rng(2)
    for planned in make_plans(groups):
        branch_requests(planned, width=WIDTH, max_tokens=tokens, rng=rng)


def planting(plans: list[Plan], drawn: list[list[Rollout]]) -> list[Forest]:
    """From rollouts to forests, with the whole responses that the verifier reads."""
    forests = []
    for i, (planned, rollouts) in enumerate(zip(plans, drawn, strict=True)):
        whole_responses(planned, rollouts, width=WIDTH)
        verdicts = [Verdict(float((i + j) % 3 == 0), "number") for j in range(len(rollouts))]
        forests.append(plant(planned, rollouts, verdicts, width=WIDTH))
    return forests


def advantages(forests: list[Forest], name: str = "tree") -> list[Sample]:
    rng = np.random.default_rng(3)
    return with_signal([s for forest in forests for s in ESTIMATORS[name](forest, rng)])


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Median processor time of a call: of this process, one thread, so that a busy machine does not count."""
    spent = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return median(spent)


def peak_bytes(prompts: int, tokens: int) -> dict[str, float]:
    """Peak allocation of planning, planting and advantages over what they are given."""
    rng = np.random.default_rng(0)
    groups = make_groups(rng, prompts, tokens)
    drawn = draw_branches(rng, make_plans(groups), tokens)
    tracemalloc.start()
    try:
        planning(groups, tokens)
        samples = advantages(planting(make_plans(groups), drawn))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    trained = sum(len(s.response) for s in samples)
    return {
        "tokens": tokens,
        "sample_tokens": trained,
        "peak_mb": round(peak / 1e6, 1),
        "bytes_per_token": peak / trained,
    }


def measure(prompts: int, tokens: int, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    texts = [token_texts(rng, tokens) for _ in range(prompts * GROUP)]
    segmentation = seconds(lambda: [blank_lines(t) for t in texts], repeats)
    groups = make_groups(rng, prompts, tokens)
    plans = make_plans(groups)
    drawn = draw_branches(rng, plans, tokens)
    forests = planting(plans, drawn)
    samples = advantages(forests)
    times = {
        "planning": seconds(lambda: planning(groups, tokens), repeats),
        "planting": seconds(lambda: planting(plans, drawn), repeats),
        "advantages": seconds(lambda: advantages(forests), repeats),
    }
    memory = [peak_bytes(prompts, n) for n in (tokens // 4, tokens // 2, tokens)]
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "prompts": prompts,
        "leaves": sum(1 + len(t.branches) for f in forests for t in f.trees),
        "response_tokens": tokens,
        "sample_tokens": sum(len(s.response) for s in samples),
        "steps_per_trunk": round(float(np.mean([len(t.steps) for g in groups for t in g.trunks])), 1),
        "seconds": {**times, "total": sum(times.values())},
        "seconds_segmentation_of_trunks": segmentation,
        "seconds_by_estimator": {name: seconds(partial(advantages, forests, name), 1) for name in ESTIMATORS},
        "memory": memory,
        "memory_growth": [round(b["peak_mb"] / a["peak_mb"], 2) for a, b in pairwise(memory)],
    }


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192, help="response limit; every leaf has this many")
    parser.add_argument("--repeats", type=int, default=5, help="timings are medians over this many")
    parser.add_argument("--output", type=Path, help="JSON file to write as well")
    options = parser.parse_args()
    result = measure(options.prompts, options.tokens, options.repeats)
    result["memory"] = [rounded(m) for m in result["memory"]]
    report = json.dumps(rounded(result), indent=1)
    print(report)
    if options.output:
        options.output.write_text(report + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
