"""A worker process: answers one symbolic question at a time over its standard streams, one JSON object a line.

It is started as `python -m attnrl.verify.worker`, not forked: threads, CUDA and `__main__` of the caller do not matter,
and a daemonic process may have one too. Its address space is limited, and each question has a kernel alarm that ends
the process even inside one long C call or after the caller's death.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from math import ceil
from typing import Any

GRACE = 1  # seconds past the caller's limit; the caller kills first


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """The reply to a question: `right`, or an `error` kind."""
    from attnrl.verify.symbolic import symbolic_equal

    try:
        return {"right": any(symbolic_equal(job["answer"], gold) for gold in job["golds"])}
    except MemoryError:
        return {"error": "memory"}
    except RecursionError:
        return {"error": "limit"}
    except Exception as error:  # noqa: BLE001 - the process boundary: whatever sympy raises is an error, counted as such
        return {"error": f"symbolic:{type(error).__name__}"}


def limit(memory_mb: int) -> None:
    """Bounds this process: address space, no core files, no Ctrl-C of the caller's terminal."""
    size = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def main(argv: list[str]) -> int:
    """Serves until its input ends."""
    memory_mb, timeout = int(argv[0]), float(argv[1])
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever a library prints must not enter the replies
    limit(memory_mb)
    answer({"answer": "1", "golds": ["1"]})  # imports and first-use costs come before the clock starts
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        job = json.loads(line)
        signal.alarm(ceil(timeout) + GRACE)
        reply = answer(job)
        signal.alarm(0)
        replies.write(json.dumps({"id": job["id"], **reply}) + "\n")
        replies.flush()
        if reply.get("error") == "memory":
            return 1  # a heap that was full once is not trusted again
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
