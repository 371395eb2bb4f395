"""Figures of docs/results.md over the rows of docs/results/*.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from evidence_rows import NAMES, Rows, at, by_preset, paired, spread

COLOURS = {  # what a method is -> of its points
    "on the tree of TreeRL": "#1f77b4",
    "AttnRL, or a part changed": "#d95f02",
    "told the decisive step": "#777777",
}


def curves(rows: Rows, path: Path) -> None:
    """Training accuracy against generated tokens, and the held-out differences with their intervals."""
    pyplot = drawing()
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 4.6))
    runs = by_preset(rows, "main")
    budget = min(r["tokens"] for own in runs.values() for r in own.values())
    grid = np.linspace(0.05, 1, 40) * budget
    axes[0].set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
    for preset, own in runs.items():
        lines = np.array([[at(r, "tokens", x) for x in grid] for r in own.values()])
        axes[0].plot(grid / 1e6, 100 * lines.mean(axis=0), label=NAMES[preset], linewidth=1.4)
    axes[0].set_xlabel("generated tokens, millions", fontsize=9)
    axes[0].set_title("training accuracy, mean over seeds, five iterations each", fontsize=10)
    axes[0].legend(fontsize=7)
    ends = {p: spread([100 * r["after"] for r in own.values()]) for p, own in runs.items()}
    order = sorted(ends, key=lambda p: ends[p][0])
    axes[1].errorbar(
        [ends[p][0] for p in order], range(len(order)), xerr=[ends[p][1] for p in order], fmt="o", capsize=3
    )
    axes[1].set_yticks(range(len(order)), [NAMES[p] for p in order], fontsize=8)
    axes[1].set_title("held-out accuracy at equal tokens, 95 % over seeds", fontsize=10)
    for axis in axes:
        axis.grid(alpha=0.25)
    save(figure, path)


def gains(testbeds: dict[str, Rows], path: Path, to: str = "grpo") -> None:
    """Each method's held-out difference to `to` over the seeds both have, a panel for each testbed; methods in the
    order of the first that has them, hollow with three seeds or fewer.
    """
    found = {title: differences(rows, to) for title, rows in testbeds.items()}
    means = {name: mean for own in reversed(found.values()) for name, (mean, *_) in own.items()}
    order = sorted(means, key=means.__getitem__)
    pyplot = drawing()
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(1, len(found), figsize=(2 + 4.5 * len(found), 4.8), sharex=True, sharey=True)
    for axis, (title, own) in zip(np.atleast_1d(axes), found.items(), strict=True):
        for place, name in enumerate(order):
            if name in own:
                mean, half, seeds = own[name]
                what = kind(name)
                how = {"color": COLOURS[what], "markerfacecolor": COLOURS[what] if seeds > 3 else "white"}
                axis.errorbar([mean], [place], xerr=[half], fmt="o", capsize=3, label=what, **how)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(order)), [NAMES[name] for name in order], fontsize=8)
        axis.set_title(title, fontsize=10)
        if axis is np.atleast_1d(axes)[0]:
            axis.legend(handles=[Patch(color=colour, label=what) for what, colour in COLOURS.items()], fontsize=8)
        axis.set_xlabel(f"points of held-out accuracy over {NAMES[to]}, 95 % over seeds", fontsize=9)
        axis.grid(alpha=0.25)
    save(figure, path)


def differences(rows: Rows, to: str) -> dict[str, tuple[float, float, int]]:
    """method -> its paired differences to another, in points: mean, half of the 95 % interval, and their number."""
    runs = by_preset(rows, "main")
    base = runs.pop(to)
    found = {name: [100 * gain for gain in paired(own, base)] for name, own in runs.items()}
    return {name: (*spread(gained), len(gained)) for name, gained in found.items()}


def kind(name: str) -> str:
    """What a method is, of COLOURS."""
    tree, attnrl, told = COLOURS
    return attnrl if name.startswith(("attnrl", "no_")) else told if name == "oracle" else tree


def drawing() -> Any:
    """pyplot, set so that the same rows give the same file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "attnrl"
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
