"""A worker process: answers one question at a time over its standard streams, one JSON object a line.

It is started as `python -m attnrl.verify.worker`, not forked: threads, CUDA and `__main__` of the caller do not matter,
and a daemonic process may have one too. What it serves is the function that a factory makes: `package.module:factory`,
called once with its options before the first question. From then on its address space is limited (libraries may map
much more when they are imported, torch several GB), and each question has a kernel alarm that ends the process even
inside one long C call or after the caller's death.
"""

from __future__ import annotations

import json
import os
import pkgutil
import resource
import signal
import sys
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

GRACE = 1  # seconds past the caller's limit; the caller kills first
MESSAGE = 500  # characters of an exception's message that are kept


def make(factory: str, options: dict[str, Any]) -> Callable[[Any], Any]:
    """The function to serve."""
    served: Callable[[Any], Any] = pkgutil.resolve_name(factory)(**options)
    return served


def reply_to(call: Callable[..., Any], *values: Any, **options: Any) -> dict[str, Any]:
    """What the call returned as `value`, or an `error` kind with its `message`."""
    try:
        return {"value": call(*values, **options)}
    except MemoryError:
        return {"error": "memory", "message": "MemoryError"}
    except RecursionError:
        return {"error": "limit", "message": "RecursionError"}
    except Exception as error:  # noqa: BLE001 - the process boundary: whatever is raised is told to the caller, and counted
        words = [f"{type(error).__name__}: {error}"[:MESSAGE], *getattr(error, "__notes__", [])]
        return {"error": "raised", "message": " ".join(words)}


def address_space() -> int:
    """Bytes that this process has mapped; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def limit(memory_mb: int) -> None:
    """Bounds the address space to so much beyond what is mapped now."""
    size = address_space() + (memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def main(argv: list[str]) -> int:
    """Serves until its input ends."""
    memory_mb, factory, options = int(argv[0]), argv[1], json.loads(argv[2])
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever is printed must not enter the replies

    def tell(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the caller's terminal is the caller's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    made = reply_to(make, factory, options)  # imports and first-use costs come before the clock starts
    limit(memory_mb)
    tell({"ready": "value" in made, "message": made.get("message", "")})
    if "value" not in made:
        return 1
    for line in sys.stdin:
        job = json.loads(line)
        signal.alarm(ceil(job["limit"]) + GRACE)
        reply = reply_to(made["value"], job["question"])
        signal.alarm(0)
        tell({"id": job["id"], **reply})
        if reply.get("error") == "memory":
            return 1  # a heap that was full once is not trusted again
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
