"""Is a run learning? What its metrics say when it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Row = Mapping[str, float]


def complaint(rows: Sequence[Row], *, max_response_tokens: int, delta: int, branching: bool = True) -> str:
    """Why nothing was trained in most iterations of a run, from the metrics of its iterations; "" where it learns.

    branching: whether the run's method makes branches at all.

    >>> row = {"iteration": 1, "train/valid_samples": 0, "trunks/solve_none": 1, "trunks/truncated_share": 1,
    ...        "trunks/steps": 2, "trees/count": 0}
    >>> complaint([row], max_response_tokens=512, delta=4)
    'nothing trained in 1 of 1 iterations: all responses wrong, 100 % cut off at 512 tokens, no trunk branched \
(2.0 steps a response; FCI needs more than delta = 4)'
    """
    trained = [row for row in rows if "train/valid_samples" in row]
    idle = [row for row in trained if not row["train/valid_samples"]]
    if not idle or 2 * len(idle) <= len(trained):
        return ""

    def mean(name: str) -> float:
        return sum(row.get(name, 0.0) for row in idle) / len(idle)

    causes = []
    for name, word in (("trunks/solve_none", "wrong"), ("trunks/solve_all", "right")):
        if (share := mean(name)) > 0.5:
            causes.append(f"all responses {word}" + ("" if share == 1 else f" of {share:.0%} of prompts"))
    if (cut := mean("trunks/truncated_share")) > 0.25:
        causes.append(f"{100 * cut:.0f} % cut off at {max_response_tokens} tokens")
    if branching and not any(row.get("trees/count") for row in idle):
        steps = mean("trunks/steps")
        short = f"; FCI needs more than delta = {delta}" if steps <= delta + 1 else ""
        causes.append(f"no trunk branched ({steps:.1f} steps a response{short})")
    if errors := sum(row.get("verify/errors", 0.0) for row in idle):
        causes.append(f"{errors:.0f} verdicts were errors")
    if (dropped := mean("batch/filtered_share")) > 0.5:
        causes.append(f"{dropped:.0%} of prompts dropped by the filter")
    return f"nothing trained in {len(idle)} of {len(trained)} iterations: " + ", ".join(causes or ["no cause found"])
