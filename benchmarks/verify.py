"""Throughput and accuracy of the verifier beside math-verify alone, on labelled cases, in one run on one core.

    python benchmarks/verify.py --cases $ATTNRL_DATA/eval/verifier_dev.jsonl --output verify.json

Each grader sees the same cases in the same order, one at a time in one process, after a warm-up on other text; ours
also has its worker process, on the same core, for what its rules cannot tell. Caches are emptied between rounds, so
that no case is met twice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS = 5


def load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def golds(case: dict[str, Any]) -> list[str]:
    return case["gold"] if isinstance(case["gold"], list) else [case["gold"]]


def math_verify_alone(case: dict[str, Any]) -> bool:
    """math-verify as its own documentation calls it: golds as LaTeX, the response as it is."""
    from math_verify import parse, verify

    parsed = parse(case["response"])
    return any(verify(parse(f"${gold}$"), parsed) for gold in golds(case))


def measure(
    grade: Callable[[dict[str, Any]], bool], reset: Callable[[], None], cases: list[dict[str, Any]]
) -> dict[str, Any]:
    """Answers a second (median round) and the labels missed."""
    seconds = []
    for _ in range(ROUNDS):
        reset()
        begin = time.perf_counter()
        said = [grade(case) for case in cases]
        seconds.append(time.perf_counter() - begin)
    pairs = list(zip(said, cases, strict=True))
    wrong = [case["id"] for verdict, case in pairs if verdict != case["expected"]]
    return {
        "answers_per_second_per_core": len(cases) / statistics.median(seconds),
        "seconds": [round(s, 4) for s in seconds],
        "accuracy": 1 - len(wrong) / len(cases),
        "false_positives": sum(verdict and not case["expected"] for verdict, case in pairs),
        "false_negatives": sum(case["expected"] and not verdict for verdict, case in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=Path, required=True, help="labelled cases: id, gold, response, expected")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, worker processes included
    cases = load(options.cases)

    from math_verify.parser import extract_latex, parse_expr_cached, parse_latex_cached

    from attnrl.verify import Verifier
    from attnrl.verify.equal import read

    def empty_theirs() -> None:
        for cached in (extract_latex, parse_expr_cached, parse_latex_cached):
            cached.cache_clear()

    warm = {"gold": "7", "response": r"\boxed{\frac{14}{2}}"}
    with Verifier(workers=1) as verifier:

        def ours(case: dict[str, Any]) -> bool:
            return bool(verifier.grade([(case["response"], golds(case))])[0].reward)

        ours(warm | {"response": r"\boxed{\int_0^7 1 dx}"})
        math_verify_alone(warm)
        result = {
            "cases": len(cases),
            "rounds": ROUNDS,
            "attnrl": measure(ours, read.cache_clear, cases),
            "math_verify_0.9.0": measure(math_verify_alone, empty_theirs, cases),
        }
    result["ratio"] = (
        result["attnrl"]["answers_per_second_per_core"] / result["math_verify_0.9.0"]["answers_per_second_per_core"]
    )
    text = json.dumps(result, indent=2)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
