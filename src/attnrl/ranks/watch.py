"""Phases that cannot hang: a line while one runs long, stack traces and an error when it exceeds its limit."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attnrl.errors import TrainingError

BEAT_S = 60.0  # between two lines about a phase that is still running


@contextmanager
def traced(limit_s: float) -> Iterator[None]:
    """On a rank: open past the limit, this process prints the stack of every thread, once."""
    faulthandler.dump_traceback_later(limit_s, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Watch:
    """Times phases, and ends those that exceed the limit."""

    def __init__(self, limit_s: float, say: Callable[[str], None], *, key: str, grace_s: float = 15.0) -> None:
        """`key`: where a user sets the limit. `grace_s`: from it to the error, for the traces of ranks to arrive."""
        self.limit_s, self.say, self.key, self.grace_s = limit_s, say, key, grace_s
        self.seconds: dict[str, float] = {}  # by phase, since `metrics` was last asked

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """While open, says every minute that the phase still runs; at the limit, prints the driver's stack (the ranks
        print their own), then raises TrainingError. All this comes by alarms: in the main thread only."""
        start, main = time.monotonic(), threading.current_thread() is threading.main_thread()
        limit_s, over = self.limit_s, False

        def alarm(*_: object) -> None:
            nonlocal over
            took = time.monotonic() - start
            if over := took >= limit_s + self.grace_s:
                raise KeyboardInterrupt  # ray.get lets no other error of a handler through
            if took >= limit_s:
                self.say(f"{name} exceeds its limit of {limit_s:g} s; where driver and ranks stand:")
                faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
                signal.setitimer(signal.ITIMER_REAL, limit_s + self.grace_s - took)
                return
            self.say(f"{name} runs, {took:.0f} s")
            signal.setitimer(signal.ITIMER_REAL, min(BEAT_S, limit_s - took))

        if main:
            before = signal.signal(signal.SIGALRM, alarm)
            signal.setitimer(signal.ITIMER_REAL, min(BEAT_S, limit_s))
        try:
            yield
        except KeyboardInterrupt:
            if not over:
                raise
            message = f"{name} took longer than {self.key} ({limit_s:g} s); stack traces are above"
            raise TrainingError(message) from None
        finally:
            if main:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def metrics(self) -> dict[str, float]:
        """Seconds in each phase since last asked."""
        found, self.seconds = {f"engine/{name}_seconds": took for name, took in self.seconds.items()}, {}
        return found
