"""The command line. Each command is a module of this package, imported only when it is called.

A command module has `main(argv: list[str]) -> int | None`; user mistakes raise AttnRLError and end in one message
and exit code 2, without a traceback.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from attnrl.errors import AttnRLError, Interrupted, near
from attnrl.version import __version__

COMMANDS = {
    "demo": "train a tiny model on this machine and show that it got better",
    "train": "train a policy: attnrl train PRESET --run-dir D",
    "check": "look at config, data, rewards, memory and model before training",
    "eval": "pass@1 and pass@k of a model, or of stored responses",
    "score": "FCI, entropy and branch points of every step of stored responses",
    "verify": "grade a file of responses against reference answers",
    "warmup": "supervised warm-up of a small model on made-up task solutions",
    "data": "report on data files: duplicates, conflicts, benchmark problems",
    "tasks": "write made-up reasoning tasks to a file",
    "view": "look at runs in the browser, live: curves, every tree, reasons",
    "report": "write the HTML report of a run directory",
    "compare": "compare runs at an equal budget: methods over seeds, with intervals",
    "disrupt": "hide one step from later text and see what it costs",
    "figures": "write the figures of the paper from runs of yours",
    "config": "print the resolved config of a preset",
    "presets": "list the presets",
}


GO_ON = {  # what to do after an interruption
    "demo": "; the same command goes on from the newest checkpoint",
    "train": "; the same command with --resume goes on from the newest checkpoint, if there is one yet",
    "eval": "; the same command goes on where this one stopped",
    "disrupt": "; the same command goes on where this one stopped",
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {line}" for name, line in COMMANDS.items()]
    return "\n".join(
        [
            f"attnrl {__version__}: process-supervised RL that branches where later text attends",
            "",
            "usage: attnrl COMMAND [options]      attnrl COMMAND --help explains one command",
            "",
            *lines,
            "",
            "begin with `attnrl demo`",
        ]
    )


def run(argv: list[str]) -> int:
    """The exit code of a command line."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] in ("-V", "--version"):
        print(__version__)
        return 0
    if argv[0] not in COMMANDS:
        hint = near(argv[0], COMMANDS)
        print(f"attnrl: no command {argv[0]!r}{hint}; `attnrl --help` lists them", file=sys.stderr)
        return 2
    try:
        with ended_by_sigterm():
            code: int = importlib.import_module(f"attnrl.cli.{argv[0]}").main(argv[1:]) or 0
            sys.stdout.flush()  # here, where a reader that has gone is no error
            return code
    except (AttnRLError, OSError, UnicodeError) as error:  # of a file, the system says which
        if not isinstance(error, AttnRLError) and hasattr(error, "__notes__"):
            raise  # of a part: where it happened is what helps
        if isinstance(error, BrokenPipeError):  # whoever read the output has gone, as `| head` does: nothing to say
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        print(f"attnrl {argv[0]}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        said = f"attnrl {argv[0]}: {stop}" if str(stop) else f"stopped{GO_ON.get(argv[0], '')}"
        print(said, file=sys.stderr)
        return 128 + (stop.number if isinstance(stop, Interrupted) else signal.SIGINT)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """While open, SIGTERM is raised as Interrupted, so that what runs is closed: no process outlives a command."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted("", number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def entry() -> None:
    # Threads that wait for one another spin, and on a busy machine they spin in the way of what they wait for; a short
    # spin costs nothing on a free one. Read once, when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("KMP_BLOCKTIME", "1")
    sys.path.insert(0, "")  # parts of the user's own, named package.module:function, may lie in the current folder
    sys.exit(run(sys.argv[1:]))
