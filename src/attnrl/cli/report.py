"""attnrl report RUN_DIR ... [--output FILE] [--iterations N,...] [--forests N]

Writes the report of one run, or of several to compare, as one HTML file:
held-out accuracy with its intervals, the paper's curves, seconds per phase, and
a viewer of forests: steps with their FCI, branch points, values and advantages.
The file needs no network and no other file. A run that is still going is
reported as far as it has come. The trees are the most telling ones of the first
and the last iteration on record, or of the iterations you name; `attnrl view`
shows all of them.

Examples:
  attnrl report runs/a
  attnrl report runs/a runs/b runs/c --output compare.html
  attnrl report runs/a --iterations 1,14,20 --forests 30
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from attnrl.analysis import write_report
from attnrl.cli.files import check_folder
from attnrl.cli.flags import read_flags
from attnrl.config import Section


class ReportFlags(Section):
    """The flags of `attnrl report`."""

    run_dirs: tuple[Path, ...]
    """run directories of `attnrl train`; each becomes one colour."""
    output: Path | None = None
    """Where to write; by default report.html, in the run directory for one run, here for several."""
    iterations: tuple[int, ...] = ()
    """Iterations whose trees to show; by default the first and the last on record."""
    forests: int | None = None
    """How many forests to show, over all runs; by default 12, or 4 where responses are long."""


def main(argv: list[str]) -> None:
    options, _ = read_flags(ReportFlags, argv, str(__doc__), words="run_dirs")
    check_folder("output", options.output)
    inside = options.run_dirs[0] if len(options.run_dirs) == 1 else Path()
    with Console(stderr=True).status("reading the run directories"):
        output = options.output or inside / "report.html"
        written = write_report(options.run_dirs, output, iterations=options.iterations, forests=options.forests)
    print(f"{written} ({written.stat().st_size / 1e6:.2f} MB)")
