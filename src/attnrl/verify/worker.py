"""A worker process: answers one question at a time over its standard streams, one JSON object a line.

It is started as `python -m attnrl.verify.worker`, not forked: threads, CUDA and `__main__` of the caller do not matter,
and a daemonic process may have one too. Its address space is limited, and each question has a kernel alarm that ends
the process even inside one long C call or after the caller's death. What it serves is the function that a factory
makes: `package.module:factory`, called once with its options before the first question.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from math import ceil
from typing import Any

GRACE = 1  # seconds past the caller's limit; the caller kills first
MESSAGE = 500  # characters of an exception's message that are kept


def make(factory: str, options: dict[str, Any]) -> Callable[[Any], Any]:
    """The function to serve."""
    module, _, name = factory.partition(":")
    served: Callable[[Any], Any] = getattr(importlib.import_module(module), name)(**options)
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


def limit(memory_mb: int) -> None:
    """Bounds this process: address space, no core files, no Ctrl-C of the caller's terminal."""
    size = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def main(argv: list[str]) -> int:
    """Serves until its input ends."""
    memory_mb, factory, options = int(argv[0]), argv[1], json.loads(argv[2])
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever is printed must not enter the replies

    def tell(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    limit(memory_mb)
    made = reply_to(make, factory, options)  # imports and first-use costs come before the clock starts
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
