"""attnrl demo [PRESET ...] [--output DIR]: train a tiny model on this machine and show that it got better.

Takes the small model that comes with attnrl, measures it on held-out problems, trains it with AttnRL on made-up
arithmetic tasks, measures it again, prints a table and writes a report you open in a browser. A few minutes on two
cores, no GPU, no download. Further presets (demo_grpo, demo_treerl) are trained one after the other and compared.

  attnrl demo                                   AttnRL alone, into runs/demo
  attnrl demo demo demo_grpo demo_treerl        the three methods side by side
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from attnrl.cli.flags import parse, show, wants_help
from attnrl.cli.train import run_training
from attnrl.config import load_config
from attnrl.errors import ConfigError
from attnrl.run import read_metrics

HELD_OUT = "eval/tasks/pass@1"


def main(argv: list[str]) -> int:
    if wants_help(argv):
        show(str(__doc__))
        return 0
    words, flags = parse(argv, plain=["output"])
    names = words or ["demo"]
    output = Path(flags.pop("output", "runs/demo"))
    configs = {name: load_config(name, flags) for name in names}
    if output.exists() and any(output.iterdir()):
        output = _next_free(output)
        show(f"writing into {output}: earlier results are kept")
    for name, config in configs.items():
        run_training(config, output / name, resume=False)
    from attnrl.analysis.report import write_report

    runs = [output / name for name in names]
    report = write_report(runs, output / "report.html")
    Console().print(summary(runs))
    show(f"report: {report}")
    return 0


def summary(runs: list[Path]) -> Table:
    """Held-out accuracy before and after, with its 95 % interval, of each run."""
    table = Table(title="held-out accuracy in percent, at the temperature of training, with 95 % interval")
    for column in ("preset", "before", "after", "points", "tokens", "seconds"):
        table.add_column(column, justify="left" if column == "preset" else "right")
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
            f"{seconds:.0f}",
        )
    return table


def _interval(metrics: dict[str, float]) -> str:
    low, high = metrics[f"{HELD_OUT}_low"], metrics[f"{HELD_OUT}_high"]
    return f"{100 * metrics[HELD_OUT]:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _next_free(path: Path) -> Path:
    return next(p for i in range(2, 10_000) if not (p := path.with_name(f"{path.name}-{i}")).exists())
