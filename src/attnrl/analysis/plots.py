"""The paper's figures from run directories, as SVG, PDF and PNG; matplotlib, behind the extra `report`.

One colour a method, told apart by dashes as well; a line is the mean over seeds, a band their range. Figures have their
numbers in the paper: 4 FCI of problems, 5 pipeline, 6 branching, 7 sampling, 8 dynamics, 9 test curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from attnrl.analysis.comparison import Method, positions
from attnrl.analysis.curves import benchmarks
from attnrl.analysis.disruption import TYPES, Trial, by_position, effects
from attnrl.analysis.problems import Problem, means_by_iteration, problems
from attnrl.analysis.records import RunRecord
from attnrl.errors import MissingExtraError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
DASHES = ("-", "--", "-.", ":")
FORMATS = ("svg", "pdf", "png")
EMA = 0.6
PHASES = ("generate", "verify", "score", "update")


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a figure: a metric over an axis."""

    title: str
    key: str
    label: str  # of the vertical axis, with its unit
    scale: float = 1.0
    axis: str = "iterations"
    smooth: bool = True


FIGURES: dict[str, tuple[Panel, ...]] = {
    "fig6_branching": (
        Panel("(a) Solve-all, branches", "branches/solve_all", "prompts (%)", 100),
        Panel("(b) Solve-none, branches", "branches/solve_none", "prompts (%)", 100),
        Panel("(c) Valid, branches", "branches/valid", "prompts (%)", 100),
        Panel("(d) Valid, both samplings", "both/valid", "prompts (%)", 100),
    ),
    "fig7_sampling": (
        Panel("(a) Easy prompts still solved by all", "branches/easy_solve_all", "prompts (%)", 100),
        Panel("(b) Valid tokens", "train/valid_token_share", "tokens (%)", 100),
        Panel("(c) Filtered", "batch/filtered_share", "prompts (%)", 100),
        Panel("(d) Prompt batch", "batch/prompts", "prompts"),
    ),
    "fig8_dynamics": (
        Panel("(a) Entropy", "policy/entropy", "nats"),
        Panel("(b) Accuracy", "eval", "held-out accuracy (%)", 100, smooth=False),
        Panel("(c) Accuracy over time", "eval", "held-out accuracy (%)", 100, axis="seconds", smooth=False),
        Panel("(d) Response length", "generate/length", "tokens"),
    ),
}
AXIS_LABELS = {"iterations": "iteration", "seconds": "training time (min)"}


def pyplot() -> Any:
    """matplotlib, drawing to files."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("figures need matplotlib: pip install 'attnrl[report]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "attnrl"}
    )
    return plt


def write_figures(methods: Sequence[Method], out: Path) -> list[tuple[str, list[Path], str]]:
    """The figures these runs have the data for, each with its files; one without any has none, and why."""
    plt = pyplot()
    out.mkdir(parents=True, exist_ok=True)
    drawn: list[tuple[str, list[Path], str]] = []

    def save(name: str, figure: Any, why: str) -> None:
        drawn.append((name, [], why) if figure is None else (name, save_figure(figure, out, name), ""))

    figure = problem_figure(plt, methods)
    save("fig4_problems", figure, no_problems(methods) if figure is None else "")
    save("fig5_pipeline", pipeline_figure(plt, methods), "no run logged seconds/generate")
    for name, panels in FIGURES.items():
        keys = ", ".join("held-out accuracy" if panel.key == "eval" else panel.key for panel in panels)
        save(name, panel_figure(plt, methods, panels), f"no run logged any of {keys}")
    names = dict.fromkeys(name for m in methods for run in m.runs for name in benchmarks(run))
    tests = [Panel(name, f"eval/{name}/pass@1", "accuracy (%)", 100, smooth=False) for name in names]
    save("fig9_tests", panel_figure(plt, methods, tests), "no run was evaluated (evaluation.every was 0)")
    return drawn


def no_problems(methods: Sequence[Method]) -> str:
    """Why Fig. 4 cannot be drawn from these runs; empty where it can."""
    runs = [run for method in methods for run in method.runs]
    if not any(run.forest_files for run in runs):
        return "no forests on record (run.save_rollouts_every was 0)"
    cases = [case for run in runs for case in problems(run.forest_files)]
    if not cases:
        return "no response was scored: no part of these runs reads FCI"
    signals = {case.signal for case in cases if not case.dropped}
    if signals == {True, False}:
        return ""
    said = {True: "every prompt had signal", False: "no prompt had signal"}
    return f"it needs prompts with signal and without: {said[signals.pop()] if signals else 'the filter dropped all'}"


def save_figure(figure: Any, out: Path, name: str) -> list[Path]:
    """The files of a figure, one a format, without the day on which they were made."""
    files = [out / f"{name}.{form}" for form in FORMATS]
    for file, undated in zip(files, ({"Date": None}, {"CreationDate": None}, {}), strict=True):
        figure.savefig(file, bbox_inches="tight", dpi=150, metadata=undated)
    pyplot().close(figure)
    return files


def column(run: RunRecord, key: str) -> list[float]:
    """A metric by logged row, not a number where it was not logged; "eval" is the mean over benchmarks."""
    if key != "eval":
        return [row.get(key, np.nan) for row in run.metrics]
    names = [f"eval/{name}/pass@1" for name in benchmarks(run) if name != "average"]
    rows = [[row[name] for name in names if name in row] for row in run.metrics]
    return [float(np.mean(found)) if found else np.nan for found in rows]


def smoothed(values: Sequence[float], weight: float = EMA) -> list[float]:
    """Exponential moving average without the bias of its start.

    >>> smoothed([1.0, 1.0, 4.0], 0.5)
    [1.0, 1.0, 2.7142857142857144]
    """
    sums = accumulate(values, lambda total, v: (weight * total[0] + v, weight * total[1] + 1), initial=(0.0, 0.0))
    return [total / mass for total, mass in list(sums)[1:]]


def panel_figure(plt: Any, methods: Sequence[Method], panels: Sequence[Panel]) -> Any:
    """Panels in one row; None where no run has any of their metrics."""
    present = [p for p in panels if any(np.isfinite(column(run, p.key)).any() for m in methods for run in m.runs)]
    if not present:
        return None
    figure, places = plt.subplots(1, len(panels), figsize=(3.1 * len(panels), 2.6), squeeze=False, layout="constrained")
    for panel, place in zip(panels, places[0], strict=True):
        for number, method in enumerate(methods):
            draw_method(place, method, panel, number)
        if panel not in present:
            place.text(0.5, 0.5, "not logged by these runs", ha="center", va="center", transform=place.transAxes)
        place.set(title=panel.title, xlabel=AXIS_LABELS[panel.axis], ylabel=panel.label)
        if panel.axis == "iterations":
            place.xaxis.get_major_locator().set_params(integer=True)
        place.grid(alpha=0.25)
    named = {label: handle for p in places[0] for handle, label in zip(*p.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named, loc="outside lower center", ncols=max(len(named), 1), frameon=False)
    return figure


def draw_method(place: Any, method: Method, panel: Panel, number: int) -> None:
    """The mean over seeds of one metric, their range as a band, single values faint where the line is smoothed."""
    lines = []
    for run in method.runs:
        x, y = positions(run, panel.axis), column(run, panel.key)  # type: ignore[arg-type]
        rows = [i for i, value in enumerate(y) if np.isfinite(value)]
        scale = 1 / 60 if panel.axis == "seconds" else 1.0
        lines.append(([scale * x[i] for i in rows], [panel.scale * y[i] for i in rows]))
    lines = [line for line in lines if line[0]]
    if not lines:
        return
    n = min(len(y) for _, y in lines)
    x = np.mean([x[:n] for x, _ in lines], axis=0)
    raw = np.array([y[:n] for _, y in lines])
    even = np.array([smoothed(y) for y in raw]) if panel.smooth else raw
    colour = COLOURS[number % len(COLOURS)]
    style = {"color": colour, "linestyle": DASHES[number % len(DASHES)], "marker": None if panel.smooth else "o"}
    if panel.smooth:
        place.plot(x, raw.mean(axis=0), color=colour, alpha=0.25, linewidth=0.8)
    if len(lines) > 1:
        place.fill_between(x, even.min(axis=0), even.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    place.plot(x, even.mean(axis=0), label=method.name, linewidth=1.6, markersize=3.5, **style)


def problem_figure(plt: Any, methods: Sequence[Method]) -> Any:
    """Mean FCI of prompts with and without signal: over training, and their distributions. Paper: Fig. 4."""
    found: list[tuple[str, list[Problem]]] = []
    for method in methods:
        cases = [case for run in method.runs for case in problems(run.forest_files)]
        if {case.signal for case in cases if not case.dropped} == {True, False}:
            found.append((method.name, cases))
    if not found:
        return None
    figure, places = plt.subplots(len(found), 2, figsize=(7, 2.7 * len(found)), squeeze=False, layout="constrained")
    for (name, cases), (left, right) in zip(found, places, strict=True):
        bins = np.quantile([c.fci for c in cases], np.linspace(0, 1, 100))[[0, -1]]
        for number, (signal, label) in enumerate(((False, "without signal"), (True, "with signal"))):
            x, mean, low, high = means_by_iteration(cases, signal)
            style = {"color": COLOURS[1 - number], "linestyle": DASHES[number]}
            left.plot(x, mean, label=label, marker="o", markersize=2.5, **style)
            left.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
            values = [c.fci for c in cases if c.signal == signal and not c.dropped]
            edges = np.linspace(bins[0], bins[1], 25).tolist()
            right.hist(values, bins=edges, density=True, histtype="step", label=f"{label} ({len(values)})", **style)
        left.set(title=f"{name}: mean FCI of prompts", xlabel="iteration", ylabel="mean FCI, 95 % interval")
        right.set(title="all iterations", xlabel="mean FCI of a prompt", ylabel="density")
        right.margins(y=0.4)  # room for the legend above the bars
        left.xaxis.get_major_locator().set_params(integer=True)
        left.margins(y=0.4)
        left.legend(frameon=False, loc="upper right")
        right.legend(frameon=False, loc="upper right")
    return figure


def pipeline_figure(plt: Any, methods: Sequence[Method]) -> Any:
    """Seconds an iteration spends in each phase, as one bar a method: what Fig. 5 draws by hand."""
    timed = [m for m in methods if any(np.isfinite(column(run, "seconds/generate")).any() for run in m.runs)]
    if not timed:
        return None
    spent = [
        [float(np.mean([np.nanmean([*column(run, f"seconds/{phase}"), np.nan]) for run in m.runs])) for phase in PHASES]
        for m in timed
    ]
    figure, place = plt.subplots(figsize=(6, 0.8 + 0.5 * len(spent)), layout="constrained")
    names = [m.name for m in timed]
    left = np.zeros(len(spent))
    for number, phase in enumerate(PHASES):
        widths = np.nan_to_num([row[number] for row in spent])
        hatch = (None, "//", "..", "xx")[number]
        place.barh(names, widths, left=left, label=phase, color=COLOURS[number], hatch=hatch, alpha=0.85)
        left += widths
    place.invert_yaxis()
    place.set(xlabel="seconds an iteration, mean", title="Where an iteration's time goes")
    place.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    return figure


def draw_disruption(trials: Sequence[Trial]) -> Any:
    """The figure of the disruption experiment: accuracy by type, and by position of the hidden step. Paper: Fig. 3."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 2.9), layout="constrained")
    found = effects(trials)
    names = [fill(TYPES[e.type].replace(" %", "\N{NO-BREAK SPACE}%"), 13) for e in found]
    for number, e in enumerate(found):
        left.bar(number, 100 * e.disrupted, color=COLOURS[number], hatch=(None, "//", "..", "xx")[number], alpha=0.85)
        bounds = [[100 * (e.disrupted - e.disrupted_low)], [100 * (e.disrupted_high - e.disrupted)]]
        left.errorbar([number], [100 * e.disrupted], yerr=bounds, color="black", capsize=3)
        left.plot([number - 0.4, number + 0.4], [100 * e.intact] * 2, color="black", linestyle="--", linewidth=1)
    left.set_xticks(range(len(names)), names, fontsize=7)
    left.set(title="(a) By type (dashed: nothing hidden)", ylabel="accuracy (%)")
    rows = by_position(trials)
    centres = [100 * (i + 0.5) / len(rows) for i in range(len(rows))]
    shown = [(x, row) for x, row in zip(centres, rows, strict=True) if row[0]]
    heights = [100 * row[1] for _, row in shown]
    bounds = [[h - 100 * row[2] for h, (_, row) in zip(heights, shown, strict=True)]]
    bounds.append([100 * row[3] - h for h, (_, row) in zip(heights, shown, strict=True)])
    right.errorbar([x for x, _ in shown], heights, yerr=bounds, color=COLOURS[0], marker="o", capsize=3)
    right.set(title="(b) By position", xlabel="place of the hidden step in the response (%)", ylabel="accuracy (%)")
    right.set_xlim(0, 100)
    right.set_ylim(bottom=0)
    return figure
