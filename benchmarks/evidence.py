"""A queue of training runs, resumable anywhere, several at once; and the tables of docs/results.md from what they left.

    python benchmarks/evidence.py run benchmarks/evidence_s.toml --stage sweep --workers 8      # learning rates
    python benchmarks/evidence.py run benchmarks/evidence_s.toml --stage main --workers 8       # the comparison
    python benchmarks/evidence.py cell benchmarks/evidence_s.toml s_atb 3 --run-dir runs/again  # one cell, from scratch
    python benchmarks/evidence.py tables                                                        # docs/results.md

A cell is (stage, preset, seed, rate), and in a stage with a table `vary` (key -> values) one value of one key. A cell
whose row is in docs/results/NAME.jsonl is done and never run again, on any machine that has the file; one that was
interrupted goes on from its run directory. A stage takes its presets and seeds from the queue file, and may fix its
`workers`: "alone" has one, so that seconds are those of a machine that runs nothing else. Stage "sweep" runs all rates;
the rate of a preset in other stages is the one with the best mean accuracy over the sweep's seeds, unless the stage
names `rates` of its own or, as `rate_of`, the preset whose rate it takes. A queue file with a table `warmup` (flags of
`attnrl warmup`), or several that build on each other, makes its base model where there is none yet, or copies the one
of that folder's name in docs/results/bases.
A cell that fails is named at the end and left to the next command. Where the code is a copy without its history,
ATTNRL_COMMIT says which commit it is.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from attnrl.data import tasks

HELD_OUT = re.compile(r"eval/(.+)/pass@1")
RESULTS = Path("docs/results")
BASES = RESULTS / "bases"  # base models of queues that would take hours on a CPU, in bfloat16
SERIES = {  # of every iteration, for the curves
    "tokens": "generate/total_tokens",
    "accuracy": "trunks/accuracy",
    "updates": "policy/updates",
    "seconds": "seconds/iteration",
    "valid": "train/valid_token_share",
    "valid_tokens": "train/valid_tokens",
    "trunks_valid": "trunks/valid",
    "branches_valid": "branches/valid",
    "both_valid": "both/valid",
    "prompts": "batch/prompts",
    "filtered": "batch/filtered_share",
    "point_share": "branches/point_share",
    "entropy": "policy/entropy",
    "kl": "policy/kl",
}


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One run of a queue."""

    stage: str
    preset: str
    seed: int
    rate: float
    knob: str = ""  # "key=value" of the one key that differs from the stage's

    @property
    def name(self) -> str:
        return "-".join([self.stage, self.preset, f"{self.rate:g}", str(self.seed), *filter(None, [self.knob])])


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue file: the rates of the sweep, for each stage its presets, seeds, overrides of config keys and, where it
    must leave time for the next, its seconds; and the flags of the warm-ups of which the last makes the base model.
    """

    name: str
    rates: tuple[float, ...]
    stages: dict[str, dict[str, Any]]
    warmups: list[dict[str, Any]] = field(default_factory=list)

    def overrides(self, cell: Cell) -> dict[str, Any]:
        fixed: dict[str, Any] = self.stages[cell.stage].get("overrides", {})
        key, _, value = cell.knob.partition("=")
        varied = {key: json.loads(value)} if key else {}
        return {**fixed, "update.lr": cell.rate, "run.seed": cell.seed, **varied}

    def cells(self, stage: str, rows: list[dict[str, Any]], only: Sequence[str] = ()) -> list[Cell]:
        """The cells of a stage, of all its presets or `only` some, seed by seed: an early stop leaves whole seeds."""
        wanted = self.stages[stage]
        knobs = [f"{key}={json.dumps(v)}" for key, values in wanted.get("vary", {}).items() for v in values] or [""]
        return [
            Cell(stage, preset, seed, rate, knob)
            for seed in wanted["seeds"]
            for preset in wanted["presets"]
            if not only or preset in only
            for rate in self.rates_of(stage, preset, rows)
            for knob in knobs
        ]

    def cell(self, preset: str, seed: int, rows: list[dict[str, Any]], stage: str | None = None) -> Cell:
        """One cell, of a stage or of the first that has the preset, "main" before the others and the sweep last."""
        order = sorted(self.stages, key=lambda name: (name == "sweep", name != "main"))
        found = [name for name in order if preset in self.stages[name]["presets"] and stage in (None, name)]
        if not found:
            raise SystemExit(f"{self.name}: no cell of {preset} in {stage or 'any stage'}; stages: {', '.join(order)}")
        rate, *_ = self.rates_of(found[0], preset, rows)
        return Cell(found[0], preset, seed, rate)

    def rates_of(self, stage: str, preset: str, rows: list[dict[str, Any]]) -> Sequence[float]:
        """Learning rates that a stage runs a preset with: all in the sweep, its own, or the sweep's best."""
        if stage == "sweep":
            return self.rates
        wanted = self.stages[stage]
        return wanted.get("rates") or (best_rate(rows, wanted.get("rate_of", preset)),)


def read_queue(path: Path) -> Queue:
    values = tomllib.loads(path.read_text())
    every = values.get("overrides", {})
    stages = {n: {**stage, "overrides": every | stage.get("overrides", {})} for n, stage in values["stages"].items()}
    warmups = values.get("warmup", [])
    warmups = [warmups] if isinstance(warmups, dict) else warmups
    return Queue(values["name"], tuple(values["rates"]), stages, warmups)


def read_rows(name: str) -> list[dict[str, Any]]:
    file = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def best_rate(rows: list[dict[str, Any]], preset: str) -> float:
    """The rate with the best mean held-out accuracy of a preset's sweep."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["cell"]["stage"] == "sweep" and row["cell"]["preset"] == preset:
            found.setdefault(row["cell"]["rate"], []).append(row["after"])
    if not found:
        raise SystemExit(f"{preset}: no sweep on record; run --stage sweep first")
    return max(found, key=lambda rate: float(np.mean(found[rate])))


def collect(name: str, runs: Path) -> int:
    """Writes the rows of finished cells into docs/results; returns how many there are in all."""
    rows = {json.dumps(row["cell"], sort_keys=True): row for row in read_rows(name)}
    for file in sorted(runs.glob("*/result.json")):
        row = json.loads(file.read_text())
        rows.setdefault(json.dumps(row["cell"], sort_keys=True), row)
    RESULTS.mkdir(parents=True, exist_ok=True)
    ordered = sorted(rows.values(), key=lambda r: tuple(r["cell"].values()))
    partial = RESULTS / f"{name}.tmp"
    partial.write_text("".join(json.dumps(row) + "\n" for row in ordered))
    partial.replace(RESULTS / f"{name}.jsonl")
    return len(rows)


def words(flags: dict[str, Any]) -> list[str]:
    """Flags as a command line has them."""
    return [
        w for key, value in flags.items() for w in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
    ]


def warm_up(queue: Queue) -> None:
    """Makes the queue's base model, if it says how and there is none yet, or copies the one that is kept."""
    outputs = [Path(flags["output"]) for flags in queue.warmups]
    if not outputs or (outputs[-1] / "config.json").exists():
        return
    if (kept := BASES / outputs[-1].name).exists():
        shutil.copytree(kept, outputs[-1])
        return
    for flags, output in zip(queue.warmups, outputs, strict=True):
        if not (output / "config.json").exists():
            print(f"warm-up of {output}", flush=True)
            made = subprocess.run([sys.executable, "-m", "attnrl", "warmup", *words(flags)], check=False)
            if made.returncode:
                raise SystemExit(f"there is no base model {output}: its warm-up failed, see above and the queue file")


def train_cell(cell: Cell, overrides: dict[str, Any], run_dir: Path) -> None:
    """Trains one cell into a run directory, or goes on where it stopped."""
    from attnrl.cli import run

    code = run(["train", cell.preset, "--run-dir", str(run_dir), "--resume", *words(overrides)])
    if code > 128:  # a signal: no further cell is begun
        raise KeyboardInterrupt
    if code:
        raise SystemExit(code)


def result(cell: Cell, run_dir: Path) -> dict[str, Any]:
    """The row of a finished cell: budgets four ways, accuracy, curves, where it branched, and what it ran on."""
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    loop = [m for m in metrics if "generate/total_tokens" in m]
    environment = json.loads((run_dir / "environment.json").read_text())
    measured = [found for m in metrics if (found := held_out(m))]
    series = {name: [_short(m.get(key)) for m in loop] for name, key in SERIES.items()}
    return {
        "cell": {name: value for name, value in asdict(cell).items() if value != ""},
        "before": float(np.mean(list(measured[0].values()))),
        "after": float(np.mean(list(measured[-1].values()))),
        "benchmarks": {name: [measured[0][name], measured[-1][name]] for name in measured[-1]},
        "iterations": len(loop),
        "updates": sum(m.get("policy/updates", 0.0) for m in loop),
        "tokens": loop[-1]["generate/total_tokens"],
        "seconds": round(sum(m["seconds/iteration"] for m in loop), 2),
        "series": {name: values for name, values in series.items() if any(v is not None for v in values)},
        "branching": branching(run_dir),
        # The variable tells the commit of a copy that has no history of its own.
        "commit": (said := os.environ.get("ATTNRL_COMMIT")) or environment["commit"],
        "changed": environment["changed"] and not said,
        "machine": environment["machine"],
        "versions": environment["versions"],
    }


def held_out(metrics: dict[str, float]) -> dict[str, float]:
    """Benchmark -> accuracy, of an iteration that measured it; without their average.

    >>> held_out({"eval/svamp/pass@1": 0.25, "eval/average/pass@1": 0.25, "eval/svamp/pass@1_low": 0.2})
    {'svamp': 0.25}
    """
    found = {match[1]: value for key, value in metrics.items() if (match := HELD_OUT.fullmatch(key))}
    return {name: value for name, value in found.items() if name != "average"}


def _short(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(f"{value:.5g}")


def branching(run_dir: Path) -> dict[str, float]:
    """Where the recorded forests branched: means over trees, points and prompts."""
    from evidence_forests import read_forests, summary

    return {name: float(f"{value:.5g}") for name, value in summary(read_forests(run_dir)).items()}


def work(number: int, cells: list[Cell], queue: Queue, runs: Path, stop_at: float) -> None:
    """One worker: takes cells that nobody holds until none is left, the time is over, or the queue is gone."""
    runs.mkdir(parents=True, exist_ok=True)
    log = (runs / f"worker-{number}.log").open("a", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    tasks.make_tasks = lru_cache(tasks.make_tasks)  # the same problems for every cell
    for cell in cells[number:] + cells[:number]:
        run_dir = runs / cell.name
        if time.time() > stop_at or not (caller := multiprocessing.parent_process()) or not caller.is_alive():
            return
        with held(runs / f"{cell.name}.lock") as free:
            failed = runs / f"{cell.name}.failed"
            if not free or (run_dir / "result.json").exists() or failed.exists():
                continue
            print(f"=== {cell.name}", flush=True)
            try:
                finish(cell, queue, run_dir)
            except (Exception, SystemExit):  # noqa: BLE001  # the other cells go on
                failed.write_text(traceback.format_exc())


def finish(cell: Cell, queue: Queue, run_dir: Path) -> None:
    """Trains a cell to its end and leaves its row in the run directory."""
    start = time.time()
    train_cell(cell, queue.overrides(cell), run_dir)
    row = {**result(cell, run_dir), "wall_seconds": round(time.time() - start, 1)}
    (run_dir / "result.tmp").write_text(json.dumps(row))
    (run_dir / "result.tmp").replace(run_dir / "result.json")
    for folder in ("forests", "checkpoints"):  # what the row was made of is not needed again
        shutil.rmtree(run_dir / folder)


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Whether this process got the lock; it is given back at the end, however that comes."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def run_queue(args: argparse.Namespace) -> None:
    queue, end = read_queue(args.queue), time.time() + args.seconds
    runs = args.runs or Path("runs/evidence") / queue.name
    if unknown := set(args.presets) - {preset for stage in args.stage for preset in queue.stages[stage]["presets"]}:
        raise SystemExit(f"{args.queue}: no stage of {args.stage} has the presets {sorted(unknown)}")
    warm_up(queue)
    collect(queue.name, runs)
    for old in runs.glob("*.failed"):
        old.unlink()
    for stage in args.stage:
        rows = read_rows(queue.name)
        done = {Cell(**row["cell"]) for row in rows}
        cells = [c for c in queue.cells(stage, rows, args.presets) if c not in done]
        stop_at = min(end, time.time() + queue.stages[stage].get("seconds", args.seconds))
        at_once = queue.stages[stage].get("workers", args.workers)
        print(f"{stage}: {len(cells)} cells to run, {at_once} at once", flush=True)
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=work, args=(n, cells, queue, runs, stop_at)) for n in range(at_once)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if died := sum(worker.exitcode != 0 for worker in workers):
            print(f"{died} workers died; their logs are {runs}/worker-*.log", flush=True)
        print(f"{collect(queue.name, runs)} cells on record in {RESULTS / queue.name}.jsonl", flush=True)
    failed = sorted(runs.glob("*.failed"))
    for file in failed:
        print(f"{file.stem} failed: {file.read_text().splitlines()[-1]}", flush=True)
    if failed:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    queue = verbs.add_parser("run", help="run what is missing of a queue")
    queue.add_argument("queue", type=Path)
    queue.add_argument("--stage", nargs="+", default=["sweep", "main"])
    queue.add_argument("--presets", nargs="+", default=[], help="of the stages' presets only these")
    queue.add_argument("--workers", type=int, default=1)
    queue.add_argument("--runs", type=Path, help="folder of run directories; by default runs/evidence/NAME")
    queue.add_argument("--seconds", type=float, default=1e9, help="start no further cell after so many")
    cell = verbs.add_parser("cell", help="run one cell of a queue from scratch and print its row")
    cell.add_argument("queue", type=Path)
    cell.add_argument("preset")
    cell.add_argument("seed", type=int)
    cell.add_argument("--stage", help="by default main, or the first other one that has the preset")
    cell.add_argument("--run-dir", type=Path, required=True)
    verbs.add_parser("tables", help="write the tables and figures of docs/results.md")
    args = parser.parse_args()
    if args.verb == "run":
        run_queue(args)
    elif args.verb == "cell":
        wanted = read_queue(args.queue)
        one = wanted.cell(args.preset, args.seed, read_rows(wanted.name), args.stage)
        warm_up(wanted)
        train_cell(one, wanted.overrides(one), args.run_dir)
        row = result(one, args.run_dir)
        print(json.dumps({k: v for k, v in row.items() if k != "series"}, indent=2))
    else:
        from evidence_tables import write_all

        write_all(RESULTS)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
