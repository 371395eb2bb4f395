"""attnrl report RUN_DIR ... [--output FILE]: the report of one run, or of several to compare, as one HTML file.

Held-out accuracy with its intervals, the paper's curves, seconds per phase, and a viewer of forests: steps with their
FCI, branch points, values and advantages. The file needs no network and no other file. A run that is still going is
reported as far as it has come.

  attnrl report runs/a
  attnrl report runs/a runs/b runs/c --output compare.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from attnrl.analysis import write_report


def report(
    run_dirs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR [RUN_DIR ...]", help_behavior_hint="")
    ],
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
) -> int:
    """Write the report and print where.

    Args:
        run_dirs: Run directories of `attnrl train`; each becomes one colour.
        output: Where to write; by default report.html, in the run directory for one run, here for several.
    """
    if output is None:
        output = run_dirs[0] / "report.html" if len(run_dirs) == 1 else Path("report.html")
    with Console(stderr=True).status("reading the run directories"):
        written = write_report(run_dirs, output)
    print(f"{written} ({written.stat().st_size / 1e6:.2f} MB)")
    return 0


def main(argv: list[str]) -> int:
    return tyro.cli(report, args=argv, prog="attnrl report", description=str(__doc__))
