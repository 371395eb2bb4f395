"""Tables and curves of several run directories at equal numbers of generated tokens, for docs/first_runs.md.

    python benchmarks/first_runs.py RUN_DIR ... --tokens 9e6 --figure docs/figures/first_runs.svg
    python benchmarks/first_runs.py runs/demo_* --tokens 7.5e5 --seeds      # NAME_SEED: one line a name, with spread

Prints Markdown. Each run is read up to its first evaluation at or after `--tokens`; the figure shows all of it.
Needs matplotlib (extra `report`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

HELD_OUT = "eval/tasks/pass@1"
Metrics = list[dict[str, float]]


def read(run: Path) -> tuple[str, Metrics]:
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return run.name, metrics


def upto(metrics: Metrics, tokens: float) -> Metrics:
    """Iterations up to the first evaluation at or after so many tokens."""
    kept = []
    for m in metrics:
        kept.append(m)
        if m.get("generate/total_tokens", 0.0) >= tokens and HELD_OUT in m:
            return kept
    raise SystemExit(f"a run has no evaluation at or after {tokens:,.0f} tokens")


def percent(m: dict[str, float]) -> str:
    return f"{100 * m[HELD_OUT]:.1f} ({100 * m[HELD_OUT + '_low']:.1f} to {100 * m[HELD_OUT + '_high']:.1f})"


def mean(metrics: Metrics, key: str, form: str = "{:.2f}", scale: float = 1.0) -> str:
    values = [m[key] for m in metrics if key in m]
    return form.format(scale * float(np.mean(values))) if values else "-"


def total(metrics: Metrics, key: str) -> float:
    return sum(m.get(key, 0.0) for m in metrics)


def table(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def accuracy_table(runs: dict[str, Metrics], tokens: float) -> str:
    rows = [["run", "before", "after", "iterations", "tokens generated", "valid tokens trained on", "loop seconds"]]
    for name, metrics in runs.items():
        part = upto(metrics, tokens)
        rows.append(
            [
                name,
                percent(part[0]),
                percent(part[-1]),
                f"{part[-1]['iteration']:.0f}",
                f"{part[-1]['generate/total_tokens'] / 1e6:.2f}M",
                f"{total(part, 'train/valid_tokens') / 1e6:.2f}M",
                f"{total(part, 'seconds/iteration'):.0f}",
            ]
        )
    return table(rows)


def seed_table(runs: dict[str, Metrics], tokens: float) -> str:
    """One line per name before the last underscore: mean over its seeds, the lowest and the highest."""
    groups: dict[str, list[Metrics]] = {}
    for name, metrics in sorted(runs.items()):
        groups.setdefault(name.rpartition("_")[0], []).append(upto(metrics, tokens))
    rows = [["runs", "seeds", "before", "after: mean (lowest to highest)", "iterations", "updates", "tokens generated"]]
    for name, parts in groups.items():
        after = [100 * part[-1][HELD_OUT] for part in parts]
        rows.append(
            [
                name,
                str(len(parts)),
                f"{np.mean([100 * part[0][HELD_OUT] for part in parts]):.1f}",
                f"{np.mean(after):.1f} ({min(after):.1f} to {max(after):.1f})",
                f"{np.mean([part[-1]['iteration'] for part in parts]):.0f}",
                f"{np.mean([total(part, 'policy/updates') for part in parts]):.0f}",
                f"{np.mean([part[-1]['generate/total_tokens'] for part in parts]) / 1e6:.2f}M",
            ]
        )
    return table(rows)


def end_table(runs: dict[str, Metrics]) -> str:
    rows = [["run", "last evaluation", "at iteration", "tokens generated", "minutes in the loop"]]
    for name, metrics in runs.items():
        last = [m for m in metrics if HELD_OUT in m][-1]
        minutes = total(metrics, "seconds/iteration") / 60
        tokens = last["generate/total_tokens"] / 1e6
        rows.append([name, percent(last), f"{last['iteration']:.0f}", f"{tokens:.2f}M", f"{minutes:.1f}"])
    return table(rows)


def phase_table(runs: dict[str, Metrics], tokens: float) -> str:
    phases = ("generate", "verify", "score", "update", "iteration")
    rows = [["run", *(f"{p}, s" for p in phases), "peak memory, GB", "tokens/s while generating"]]
    for name, metrics in runs.items():
        part = upto(metrics, tokens)[1:]
        speed = total(part, "generate/tokens") / total(part, "seconds/generate")
        peak = max(m.get("device/peak_memory_gb", 0.0) for m in part)
        rows.append([name, *(mean(part, f"seconds/{p}") for p in phases), f"{peak:.1f}", f"{speed:,.0f}"])
    return table(rows)


def ratio_table(runs: dict[str, Metrics], tokens: float) -> str:
    columns = {
        "trunks valid": "trunks/valid",
        "branches valid": "branches/valid",
        "both valid": "both/valid",
        "valid token share": "train/valid_token_share",
        "filtered": "batch/filtered_share",
        "prompts": "batch/prompts",
        "branch point at": "branches/point_share",
        "prefix tokens reused": "generate/shared_context",
    }
    rows = [["run", *columns]]
    for name, metrics in runs.items():
        part = upto(metrics, tokens)[1:]
        rows.append([name, *(mean(part, key) for key in columns.values())])
    return table(rows)


def draw(runs: dict[str, Metrics], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "attnrl"
    from matplotlib import pyplot

    panels: list[tuple[str, str]] = [
        (HELD_OUT, "held-out accuracy"),
        ("train/valid_token_share", "share of tokens with signal"),
        ("policy/entropy", "entropy, nats"),
        ("batch/prompts", "prompts a batch"),
    ]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15, 3.4))
    for (key, title), axis in zip(panels, np.atleast_1d(axes), strict=True):
        for name, metrics in runs.items():
            points = [(m.get("generate/total_tokens", 0.0) / 1e6, m) for m in metrics if key in m]
            line: Any = axis.plot([x for x, _ in points], [m[key] for _, m in points], label=name, linewidth=1.4)
            if key == HELD_OUT:
                low, high = ([m[f"{key}_{side}"] for _, m in points] for side in ("low", "high"))
                axis.fill_between([x for x, _ in points], low, high, color=line[0].get_color(), alpha=0.12)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("generated tokens, millions", fontsize=9)
        axis.grid(alpha=0.25)
    np.atleast_1d(axes)[0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--tokens", type=float, required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--seeds", action="store_true", help="runs are named NAME_SEED: print one line a name")
    args = parser.parse_args()
    runs = dict(read(run) for run in args.runs)
    if args.seeds:
        print(seed_table(runs, args.tokens))
        return
    for part in (accuracy_table(runs, args.tokens), ratio_table(runs, args.tokens), phase_table(runs, args.tokens)):
        print(part + "\n")
    print(end_table(runs))
    if args.figure:
        draw(runs, args.figure)


if __name__ == "__main__":
    main()
