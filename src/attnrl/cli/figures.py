"""attnrl figures RUN_DIR ... --out DIR

Writes the figures of the paper from runs of yours, as SVG, PDF and PNG: FCI of
problems (Fig. 4), time per phase (Fig. 5), branching, sampling and training
dynamics (Figs. 6 to 8), test curves (Fig. 9). Runs whose configs are the same
but for the seed are one method: a line is their mean, a band their range. Also
prints how well FCI tells prompts without signal from the others (Sec. 3.2.1).

Needs matplotlib: pip install 'attnrl[report]'

Examples:
  attnrl figures runs/grpo runs/treerl runs/attnrl --out figures
"""

from __future__ import annotations

from math import isnan
from pathlib import Path

from attnrl.analysis.comparison import group_methods
from attnrl.analysis.plots import no_problems, pyplot, write_figures
from attnrl.analysis.problems import problems, separation
from attnrl.analysis.records import read_run
from attnrl.analysis.report import named_runs
from attnrl.cli.flags import read_flags
from attnrl.config import Section


class FiguresFlags(Section):
    """The flags of `attnrl figures`."""

    run_dirs: tuple[Path, ...]
    """run directories of `attnrl train`."""
    out: Path
    """The directory to write into."""


def main(argv: list[str]) -> None:
    options, _ = read_flags(FiguresFlags, argv, str(__doc__), words="run_dirs")
    named = named_runs(options.run_dirs)
    pyplot()  # a missing extra is said before anything is read
    methods = group_methods([read_run(path, name) for path, name in named])
    for name, files, why in write_figures(methods, options.out):
        print(f"{name}: {', '.join(f.name for f in files) or f'not drawn: {why}'}")
    for method in methods:
        if why := no_problems([method]):
            print(f"{method.name}, FCI of problems: {why}")
            continue
        cases = [case for run in method.runs for case in problems(run.forest_files)]
        for scope in ("all", "easy"):
            if found := separation(cases, scope):
                few = "(one prompt on a side: no interval)"
                interval = few if isnan(found.low) else f"[{found.low:+.3g}, {found.high:+.3g}]"
                print(
                    f"{method.name}, {scope} prompts: mean FCI {found.mean_without:.4g} of {found.without} without "
                    f"signal, {found.mean_others:.4g} of {found.others} with; difference {found.difference:+.3g} "
                    f"{interval}; AUC of low FCI {found.auc_fci:.3f}, of trunk accuracy "
                    f"{found.auc_accuracy:.3f}"
                )
