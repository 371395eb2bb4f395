"""attnrl report RUN_DIR ... [--output FILE]

Writes the report of one run, or of several to compare, as one HTML file:
held-out accuracy with its intervals, the paper's curves, seconds per phase, and
a viewer of forests: steps with their FCI, branch points, values and advantages.
The file needs no network and no other file. A run that is still going is
reported as far as it has come.

Examples:
  attnrl report runs/a
  attnrl report runs/a runs/b runs/c --output compare.html
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from attnrl.analysis import write_report
from attnrl.cli.flags import read_flags
from attnrl.config import Section


class ReportFlags(Section):
    """The flags of `attnrl report`."""

    run_dirs: tuple[Path, ...]
    """run directories of `attnrl train`; each becomes one colour."""
    output: Path | None = None
    """Where to write; by default report.html, in the run directory for one run, here for several."""


def main(argv: list[str]) -> int:
    options, _ = read_flags(ReportFlags, argv, str(__doc__), words="run_dirs")
    inside = options.run_dirs[0] if len(options.run_dirs) == 1 else Path()
    with Console(stderr=True).status("reading the run directories"):
        written = write_report(options.run_dirs, options.output or inside / "report.html")
    print(f"{written} ({written.stat().st_size / 1e6:.2f} MB)")
    return 0
