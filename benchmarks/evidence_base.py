"""What was measured of base models without training them: hidden steps (Fig. 3), FCI of problems (Fig. 4), node values.

    attnrl disrupt --model runs/s --output runs/hidden --benchmarks tasks --task-count 384 --samples 1 \\
      --temperature 1 --max-tokens 300 --template '{problem}' --data.tasks.forks hub,method,turn \\
      --data.tasks.operations 6,9 --data.tasks.routine 2,8 --data.tasks.modulus 11 --data.tasks.wording equations
    python benchmarks/evidence_base.py trials runs/hidden docs/results/s_trials.parquet
    PYTHONPATH=benchmarks attnrl train s_atb --algo.estimator node_values:nothing --run-dir runs/problems \\
      --algo.prompts 32 --run.iterations 2 --run.save_rollouts_every 1 --evaluation.every 0
    python benchmarks/evidence_base.py problems runs/problems docs/results/s_problems.parquet

For pair: runs/pair, 256 problems of at most 340 tokens, forks pair, operations 8,11 and routine 2,6. For M: runs/m, 768
of at most 520, operations 4,4 and routine 26,28. The trained tail and M are runs of `attnrl train s_oracle` from their
bases with the overrides of their queues (seed 200; rate 1e-4 and 3.6M tokens, 5e-5 and 6M), with `--model.path` such a
run and six and eight iterations of 32 prompts (seed 201) in the third command.
`python benchmarks/evidence.py tables` makes tables and figures of the kept files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from attnrl.analysis.disruption import BINS, TYPES, Trial, by_position, contrast, effects
from attnrl.analysis.intervals import auc
from attnrl.analysis.problems import Separation, problems, separation

TESTBEDS = {
    "s": "S",
    "pair": "pair",
    "long": "long",
    "late": "late",
    "tail": "tail",
    "tailtrained": "tail, trained",
    "m": "M",
    "mtrained": "M, trained",
    "demo": "the demo",
    "trained": "the demo, trained",
}
Cells = list[list[str]]


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt of one iteration: what `Problem` says of it, and how many steps its trunks have, in the mean."""

    iteration: int
    uid: str
    fci: float
    accuracy: float
    signal: bool
    dropped: bool
    steps: float


def cases_of(run: Path) -> list[Case]:
    """Every prompt of a run's recorded forests."""
    files = sorted((run / "forests").glob("*.parquet"))
    steps: dict[tuple[int, str], list[int]] = {}
    for file in files:
        for row in pq.read_table(file, columns=["uid", "kind", "step_starts"]).to_pylist():
            if row["kind"] == "trunk":
                steps.setdefault((int(file.stem), row["uid"]), []).append(len(row["step_starts"]))
    return [Case(**asdict(p), steps=float(np.mean(steps[p.iteration, p.uid]))) for p in problems(files)]


def keep(rows: Sequence[Trial] | Sequence[Case], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows]), path, compression="zstd")


def read_trials(path: Path) -> list[Trial]:
    return [Trial(**row) for row in pq.read_table(path).to_pylist()]


def percent(value: float, low: float, high: float, form: str = ".1f") -> str:
    return f"{100 * value:{form}} ({100 * low:{form}} to {100 * high:{form}})"


def type_cells(trials: Sequence[Trial]) -> Cells:
    """Accuracy by the kind of step hidden, and how much more hiding a top step costs than hiding one of that kind."""
    head = ["trials", "mean place", "nothing hidden", "hidden", "cost, points", "the top fifth costs more by"]
    cells = [["hidden step", *head]]
    for e in effects(trials):
        more = "" if e.type == "fci_top" else percent(*contrast(trials, "fci_top", e.type), "+.1f")
        cells.append(
            [
                TYPES[e.type],
                str(e.trials),
                f"{e.position:.2f}",
                f"{100 * e.intact:.1f}",
                percent(e.disrupted, e.disrupted_low, e.disrupted_high),
                percent(e.drop, e.drop_low, e.drop_high, "+.1f"),
                more,
            ]
        )
    return cells


def place_cells(trials: Sequence[Trial]) -> Cells:
    """Accuracy with a step hidden, by the place of the step: over all trials, and over those of two kinds."""
    kinds: dict[str, Sequence[str]] = {"all": tuple(TYPES), **{TYPES[k]: (k,) for k in ("fci_top", "fci_rest")}}
    cells = [["place of the hidden step", *kinds]]
    columns = [by_position(trials, chosen) for chosen in kinds.values()]
    for number in range(BINS):
        row = [f"{number / BINS:.1f} to {(number + 1) / BINS:.1f}"]
        for column in columns:
            count, share, low, high = column[number]
            row.append(f"{percent(share, low, high)}, {count}" if count else "-")
        cells.append(row)
    return cells


def problem_cells(found: dict[str, list[Case]]) -> Cells:
    """Mean FCI of prompts with and without signal, and how well it, the number of steps and trunk accuracy tell them
    apart, by testbed.
    """
    head = ["prompts", "without signal", "with", "mean FCI without", "with", "difference"]
    cells = [["testbed", *head, "AUC of low FCI", "at equal steps", "AUC of few steps", "AUC of trunk accuracy"]]
    for name, cases in found.items():
        for scope in ("all", "easy"):
            kept = [c for c in cases if not c.dropped and (scope == "all" or c.accuracy == 1.0)]
            none = sum(not c.signal for c in kept)
            row = [scope, str(none), str(len(kept) - none), *["-"] * 7]
            if told := separation(kept, scope):
                row[3:6] = f"{told.mean_without:.4f}", f"{told.mean_others:.4f}", apart(told)
                scores = (lambda c: -c.fci, lambda c: -c.steps, lambda c: abs(c.accuracy - 0.5))
                fci, steps, accuracy = (ranked(kept, score) for score in scores)
                row[6:] = [fci, ranked(kept, scores[0], by=lambda c: round(c.steps)), steps, accuracy]
            cells.append([TESTBEDS.get(name, name), *row])
    return cells


def apart(told: Separation) -> str:
    return f"{told.difference:+.4f} ({told.low:+.4f} to {told.high:+.4f})"


def ranked(
    cases: Sequence[Case],
    score: Callable[[Case], float],
    by: Callable[[Case], int] | None = None,
    resamples: int = 2000,
) -> str:
    """The chance that a prompt without signal has the higher score, with its 95 % interval over prompts: of any two, or
    of two alike in `by`.
    """
    scores, none = np.array([score(c) for c in cases]), np.array([not c.signal for c in cases])
    groups = np.array([by(c) if by else 0 for c in cases])
    chosen = np.random.default_rng(0).integers(len(cases), size=(resamples, len(cases)))
    drawn = [found for i in chosen if np.isfinite(found := auc_within(scores[i], none[i], groups[i]))]
    if not drawn:
        return "-"
    return "{:.2f} ({:.2f} to {:.2f})".format(auc_within(scores, none, groups), *np.quantile(drawn, [0.025, 0.975]))


def auc_within(scores: np.ndarray, positive: np.ndarray, groups: np.ndarray) -> float:
    """The area under the curve over the pairs of a group; nan without a pair.

    >>> auc_within(np.array([1.0, 2.0, 9.0, 8.0]), np.array([False, True, False, True]), np.array([0, 0, 1, 1]))
    0.5
    """
    won = pairs = 0.0
    for group in np.unique(groups):
        own = groups == group
        count = float(positive[own].sum() * (~positive[own]).sum())
        if count:
            won, pairs = won + count * auc(scores[own], positive[own]), pairs + count
    return won / pairs if pairs else float("nan")


def node_cells(found: dict[str, dict[str, Any]]) -> Cells:
    """Bias and variance of the two inner nodes of a tree, by rule."""
    head = ["nodes", "true value", "bias", "squared error", "variance", "leaves", "worth of independent rollouts"]
    cells = [["rule", "text", *head]]
    for rule, places in found.items():
        for place, q in places.items():
            bias = "{:+.3f} ({:+.3f} to {:+.3f})".format(*q["bias"])
            squared = "{:.3f} ({:.3f} to {:.3f})".format(*q["squared error"])
            row = [f"{q['true value']:.2f}", bias, squared, f"{q['variance']:.3f}"]
            cells.append([rule, place, str(q["nodes"]), *row, f"{q['leaves']:.0f}", f"{q['worth of leaves']:.1f}"])
    return cells


def base_cells(results: Path) -> dict[str, Cells]:
    """Every table of what is kept, by the name the page calls it."""
    made: dict[str, Cells] = {}
    for file in sorted(results.glob("*_trials.parquet")):
        trials = read_trials(file)
        made |= {f"{file.stem} types": type_cells(trials), f"{file.stem} places": place_cells(trials)}
    kept = {name: results / f"{name}_problems.parquet" for name in TESTBEDS}
    found = {n: [Case(**row) for row in pq.read_table(f).to_pylist()] for n, f in kept.items() if f.exists()}
    if found:
        made["problems"] = problem_cells(found)
    for file in sorted(results.glob("*_nodes.json")):
        made[file.stem] = node_cells(json.loads(file.read_text()))
    return made


def base_figures(results: Path, folder: Path) -> None:
    """The figure of hidden steps, for each testbed that has trials."""
    from attnrl.analysis.plots import draw_disruption, pyplot

    plt = pyplot()
    plt.rcParams["svg.hashsalt"] = "attnrl"
    for file in sorted(results.glob("*_trials.parquet")):
        figure = draw_disruption(read_trials(file))
        figure.savefig(folder / f"disruption_{file.stem.removesuffix('_trials')}.svg", metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("trials", "problems"))
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    if args.what == "trials":
        lines = [json.loads(line) for line in (args.run / "trials.jsonl").read_text().splitlines()]
        keep([Trial(**trial) for line in lines for trial in line["trials"]], args.output)
    else:
        keep(cases_of(args.run), args.output)


if __name__ == "__main__":
    main()
