"""Tokens that the device draws while the host prepares what comes after them.

Work for the device is queued, and what it draws is copied to the host behind it: a flight. The host waits for a flight
when it needs its tokens, and by then has queued the next one, so that the device never waits for the host.

Shapes: R rows, C tokens of each.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnrl.attention.pages import Ints


class Mark:
    """A point in the device's work: everything queued before it was made."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = time.perf_counter()  # without a queue, the work is done by now
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """The host waits until the device is here."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, before: Mark) -> float:
        """Seconds of the device's time; both have been waited for."""
        if self._event is None or before._event is None:
            return self._time - before._time
        return float(before._event.elapsed_time(self._event)) / 1e3


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """Tokens and log-probs on their way to the host, with what the rows were when they were asked for."""

    request_R: Ints
    drawn_R: Ints  # tokens that each request had drawn before
    ids_RC: Tensor  # on the host, to be read after `landed`
    logprobs_RC: Tensor
    landed: Mark
    begun: Mark | None  # of a prefill

    def land(self) -> tuple[Ints, NDArray[np.float32]]:
        """The tokens and their log-probs, once they are there."""
        self.landed.wait()
        return self.ids_RC.numpy(), self.logprobs_RC.numpy()

    @property
    def prefill_seconds(self) -> float:
        """The device's time for the forward over contexts that it began with, if it did."""
        return 0.0 if self.begun is None else self.landed.since(self.begun)


def fly(request_R: Ints, drawn_R: Ints, ids_RC: Tensor, logprobs_RC: Tensor, begun: Mark | None = None) -> Flight:
    """Queues the copies of what the device has drawn, behind the work that draws it."""
    ids, logprobs = (x.to("cpu", non_blocking=True, copy=True) for x in (ids_RC, logprobs_RC))
    return Flight(request_R.copy(), drawn_R.copy(), ids, logprobs, Mark(ids_RC.device), begun)
