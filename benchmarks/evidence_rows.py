"""Rows of docs/results/*.jsonl: what a method is called, its runs by seed, and intervals over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
       2.110, 2.101, 2.093)  # fmt: skip
NAMES = {  # of the presets s_NAME and p_NAME
    "grpo": "GRPO",
    "treerl": "TreeRL: tokens of highest surprisal",
    "treerl_off_policy": "TreeRL, one step off-policy",
    "atb": "FCI (TreeRL + ATB)",
    "atb_top10": "FCI, top 10 % of steps",
    "random": "random steps",
    "first": "first steps",
    "position": "position: FCI's mean places",
    "residual": "FCI without its position null",
    "ratio": "FCI over its position null",
    "mean": "FCI per later step",
    "entropy": "steps of highest entropy",
    "oracle": "oracle: the decisive step",
    "attnrl": "AttnRL",
    "attnrl_entropy": "AttnRL at the steps of highest entropy",
    "attnrl_ratio": "AttnRL by FCI over its position null",
    "no_filter": "AttnRL without filter",
    "no_expansion": "AttnRL without expansion",
    "no_batch": "AttnRL without adaptive batch",
}
COMPARED = ("main", "ladder", "rules", "pipeline")  # the last three are "main" with other presets, seeds or rates
Rows = list[dict[str, Any]]
Runs = dict[int, dict[str, Any]]  # of a method, by seed


def method(row: dict[str, Any]) -> str:
    """What a row's preset runs, whatever its testbed.

    >>> method({"cell": {"preset": "s_treerl_off_policy"}})
    'treerl_off_policy'
    """
    return str(row["cell"]["preset"]).partition("_")[2]


def by_preset(rows: Rows, stage: str) -> dict[str, Runs]:
    """method -> seed -> row, in the order of NAMES; "main" stands for all stages that are compared."""
    stages = COMPARED if stage == "main" else (stage,)
    found: dict[str, Runs] = {}
    for preset in NAMES:
        cells = [(r["cell"], r) for r in rows if not r["cell"].get("knob")]
        mine = [(cell, r) for cell, r in cells if cell["stage"] in stages and method(r) == preset]
        own = {cell["seed"]: r for cell, r in mine}
        if len(own) < len(mine):
            raise SystemExit(f"{preset}, stage {stage}: a seed has runs at several rates; keep those of one rate")
        if own:
            found[preset] = own
    return found


def at_one_rate(rows: Rows) -> Rows:
    """The compared runs and those of stage "stable" at the latter's rate, as rows of "main", and those of "alone",
    which tell speeds; none without stage "stable".
    """
    rates = {r["cell"]["rate"] for r in rows if r["cell"]["stage"] == "stable"}
    of_rate = [r for r in rows if r["cell"]["rate"] in rates and r["cell"]["stage"] in (*COMPARED, "stable")]
    alone = [r for r in rows if rates and r["cell"]["stage"] == "alone"]
    return [r | {"cell": r["cell"] | {"stage": "main"}} for r in of_rate] + alone


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval over seeds, Student's t; nan for one seed."""
    n = len(values)
    half = T95[min(n - 2, len(T95) - 1)] * np.std(values, ddof=1) / np.sqrt(n) if n > 1 else np.nan
    return float(np.mean(values)), float(half)


def at(row: dict[str, Any], name: str, value: float, column: str = "accuracy") -> float:
    """The training accuracy (smoothed over five iterations) when a running total reached `value`; at the end of a run
    that did not, be it by the last digit.
    """
    totals = row["series"][name] if name == "tokens" else np.cumsum(row["series"][name])
    curve = np.array(row["series"][column], dtype=float)
    place = min(int(np.searchsorted(totals, value)), len(curve) - 1)
    return float(np.nanmean(curve[max(0, place - 4) : place + 1]))


def paired(own: Runs, other: Runs) -> list[float]:
    """Differences of held-out accuracy over the seeds that both have."""
    return [row["after"] - other[seed]["after"] for seed, row in sorted(own.items()) if seed in other]
