"""Is a run learning? What its metrics say when it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Row = Mapping[str, float]
RECENT = 20  # iterations that are looked at: a run that stopped learning says so before long


def complaint(rows: Sequence[Row], *, max_response_tokens: int, delta: int, branching: bool = True) -> str:
    """Why nothing was trained in most of a run's last iterations, from their metrics; "" where it learns.

    branching: whether the run's method makes branches at all.

    >>> row = {"iteration": 1, "train/valid_samples": 0, "trunks/solve_none": 1, "trunks/truncated_share": 1,
    ...        "trunks/steps": 2, "trees/count": 0}
    >>> complaint([row], max_response_tokens=512, delta=4)
    'nothing trained in 1 of 1 iterations: all responses wrong, 100 % cut off at 512 tokens, no trunk branched \
(2.0 steps a response; FCI needs more than delta = 4)'
    """
    trained = [row for row in rows if "train/valid_samples" in row]
    rates = [1.0, *(row.get("policy/lr", 1.0) for row in trained)]  # a row has the rate of the update after its own
    recent = [(row, rate == 0) for row, rate in zip(trained, rates, strict=False)][-RECENT:]
    idle = [row for row, zero in recent if zero or not _updates(row)]
    if not idle or 2 * len(idle) <= len(recent):
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
    if skipped := sum(row.get("policy/skipped_updates", 0.0) for row in idle):
        causes.append(f"{skipped:.0f} updates skipped because loss or gradient was no number")
    if sum(zero for _, zero in recent) > len(recent) / 2:
        causes.append("the learning rate has come down to 0 (update.lr_decay_updates)")
    if (dropped := mean("batch/filtered_share")) > 0.5:
        causes.append(f"{dropped:.0%} of prompts dropped by the filter")
    of = "the last " if len(recent) < len(trained) else ""
    return f"nothing trained in {len(idle)} of {of}{len(recent)} iterations: " + ", ".join(causes or ["no cause found"])


def _updates(row: Row) -> float:
    """Updates an iteration made; of an engine that does not count them, whether it had samples with signal."""
    return row.get("policy/updates", 1.0) if row["train/valid_samples"] else 0.0
