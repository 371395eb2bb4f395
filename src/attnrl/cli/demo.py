"""attnrl demo [PRESET ...] [--output DIR] [--section.key VALUE ...]

Trains a tiny model on this machine and shows that it got better: measures the
model that comes with attnrl on held-out problems, trains it with AttnRL on
made-up arithmetic tasks, measures it again, prints a table and writes a report
for the browser. A few minutes on two cores, no GPU, no download. Further
presets (demo_grpo, demo_treerl) are trained one after the other and compared.

A demo that was stopped goes on when the same command is given again. One that
is finished is kept: the next goes into DIR-2, and so on.

Examples:
  attnrl demo                              # AttnRL alone
  attnrl demo demo demo_grpo demo_treerl   # three methods side by side
  attnrl demo --run.iterations 3           # a quick look
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from attnrl.cli.flags import read_flags, show
from attnrl.config import Config, Names, Section, load_config
from attnrl.console import time_span
from attnrl.errors import ConfigError, Interrupted
from attnrl.launch import train
from attnrl.launch.training import finished_note
from attnrl.run import check_run, read_metrics

HELD_OUT = "eval/tasks/pass@1"


class DemoFlags(Section):
    """The flags of `attnrl demo`."""

    presets: Names = ("demo",)
    """Presets, trained one after the other."""
    output: Path = Path("runs/demo")
    """Where it is written."""


def main(argv: list[str]) -> None:
    flags, overrides = read_flags(DemoFlags, argv, str(__doc__), short={}, words="presets")
    names, output = flags.presets, flags.output
    configs = {name: load_config(name, overrides) for name in names}
    place = choose_place(output, configs)
    if place != output:
        show(f"{output} is kept (finished, or other settings): writing into {place}")
    for name, config in configs.items():
        try:
            train(config, place / name, resume=(place / name).is_dir())
        except Interrupted as stop:
            said = str(stop) and f"stopped in {place / name}; the same command goes on from there"
            raise Interrupted(said, stop.number) from None
    from attnrl.analysis.report import write_report

    runs = [place / name for name in names]
    report = write_report(runs, place / "report.html")
    Console().print(summary(runs))
    show(f"report: {report}")


def summary(runs: list[Path]) -> Table:
    """Held-out accuracy before and after, with its 95 % interval, of each run."""
    title = "held-out accuracy in percent (95 % interval), temperature as in training"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("preset", overflow="fold")
    for column in ("before", "after", "points", "tokens", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        metrics = read_metrics(run)
        measured = [m for m in metrics if HELD_OUT in m]
        if len(measured) < 2:
            raise ConfigError(f"{run.name}: evaluation.every is 0, so there is no before and after")
        first, last = measured[0], measured[-1]
        seconds = sum(m.get("seconds/iteration", 0.0) for m in metrics)
        table.add_row(
            run.name,
            _interval(first),
            _interval(last),
            f"{100 * (last[HELD_OUT] - first[HELD_OUT]):+.1f}",
            f"{last['generate/total_tokens'] / 1e6:.2f}M",
            time_span(seconds),
        )
    return table


def _interval(metrics: dict[str, float]) -> str:
    low, high = metrics[f"{HELD_OUT}_low"], metrics[f"{HELD_OUT}_high"]
    return f"{100 * metrics[HELD_OUT]:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def choose_place(output: Path, configs: dict[str, Config]) -> Path:
    """The first of DIR, DIR-2, ... that is free, or holds a demo of these settings that was stopped."""
    places = (output if i == 1 else output.with_name(f"{output.name}-{i}") for i in count(1))
    return next(p for p in places if not p.exists() or not any(p.iterdir()) or _was_stopped(p, configs))


def _was_stopped(place: Path, configs: dict[str, Config]) -> bool:
    """Whether the runs of a place are of these settings and not all finished."""
    try:
        states = {n: check_run(place / n, c.model_dump(mode="json"), resume=True) for n, c in configs.items()}
    except ConfigError:
        return False
    finished = [state is not None and finished_note(state, configs[name]) for name, state in states.items()]
    return any((place / name).is_dir() for name in configs) and not all(finished)
