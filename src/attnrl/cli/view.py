"""attnrl view RUN_DIR ... [--port N]

A page over run directories in your browser, live while they train: curves that
grow, a table of every recorded forest (sort, filter, search), and an inspector
of trees that says why each was branched or not. Click a point of a curve to see
the trees of its iteration. It reads and never writes, and only this machine can
reach it; from afar, forward the port: ssh -L 8765:localhost:8765 HOST.

`attnrl report` writes the same page as one file, with a part of the trees.

Examples:
  attnrl view runs/a
  attnrl view runs/a runs/b --port 9000
"""

from __future__ import annotations

import threading
from pathlib import Path

from pydantic import Field

from attnrl.analysis.view import open_view
from attnrl.cli.flags import read_flags
from attnrl.config import Section

PORT = 8765


class ViewFlags(Section):
    """The flags of `attnrl view`."""

    run_dirs: tuple[Path, ...]
    """run directories of `attnrl train`, finished or still going."""
    port: int | None = Field(None, ge=0, le=65535)
    """On the loopback interface: by default 8765 or, where that is taken, any free one; 0: any free one."""


def main(argv: list[str]) -> None:
    options, _ = read_flags(ViewFlags, argv, str(__doc__), words="run_dirs")
    view = open_view(options.run_dirs, PORT if options.port is None else options.port, or_any=options.port is None)
    view.start()
    print(f"{view.url}   (Ctrl-C ends it)", flush=True)
    try:
        threading.Event().wait()
    finally:
        view.close()
