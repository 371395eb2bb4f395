"""The host's book of the rows that run and of what each request has drawn.

Shapes: R rows, C steps between two looks from the host, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attnrl.attention.pages import Ints
from attnrl.errors import TrainingError
from attnrl.local.draw import stream_of
from attnrl.types import Finish, Ids, Request, Rollout


def in_gaps(kept: Ints) -> Ints:
    """The same rows, the last ones in the places of those that go, so that few rows move.

    >>> in_gaps(np.array([0, 2, 3, 5, 6]))
    array([0, 5, 2, 3, 6])
    """
    order = np.arange(len(kept))
    order[np.setdiff1d(order, kept)] = kept[kept >= len(kept)]
    return order


class RowTable:
    """Host side of the running rows (the first `count`) and what has been drawn, per request."""

    def __init__(self, requests: Sequence[Request], rows: int, stops_V: NDArray[np.bool_]) -> None:
        self.stops_V = stops_V  # tokens that end a response
        limits = np.array([request.max_tokens for request in requests], np.int64)
        self.limits = limits
        self.offsets = np.concatenate([[0], np.cumsum(limits)[:-1]]).astype(np.int64)
        self.streams = np.array([stream_of(request.seed) for request in requests], np.int64)
        self.ids = np.empty(int(limits.sum()), np.int32)  # pages no token reaches are never touched
        self.logprobs = np.empty(int(limits.sum()), np.float32)
        self.lengths_of = np.zeros(len(requests), np.int64)
        self.finish: list[Finish] = ["length"] * len(requests)
        self.finished = 0
        self.resumed = np.zeros(len(requests), np.int64)  # tokens that a request had drawn when it was put back
        self.count = 0
        self.request, self.token, self.length, self.drawn = np.zeros((4, rows), np.int64)

    def record(
        self, request_R: Ints, drawn_R: Ints, ids_RC: Ints, logprobs_RC: NDArray[np.float32]
    ) -> NDArray[np.bool_]:
        """Keeps each row's new tokens up to its end and returns which requests have ended: bool [R].

        Of a request that had ended before nothing is kept.
        """
        column_C = np.arange(ids_RC.shape[1])
        after_RC = drawn_R[:, None] + column_C + 1
        stop_RC = self.stops_V[ids_RC]
        end_RC = stop_RC | (after_RC >= self.limits[request_R][:, None])
        ends_R: NDArray[np.bool_] = np.any(end_RC, axis=1)
        over_R = self.ended(request_R)
        last_R = np.where(ends_R, end_RC.argmax(axis=1), len(column_C) - 1)
        valid_RC = (column_C <= last_R[:, None]) & ~over_R[:, None]
        target_RC = self.offsets[request_R][:, None] + after_RC - 1
        kept = logprobs_RC[valid_RC]
        if not np.isfinite(kept).all():
            raise TrainingError("the model's logits are not finite: no token can be drawn; check the weights for NaN")
        self.ids[target_RC[valid_RC]] = ids_RC[valid_RC]
        self.logprobs[target_RC[valid_RC]] = kept
        for row in np.flatnonzero(ends_R & ~over_R):
            request = int(request_R[row])
            self.lengths_of[request] = drawn_R[row] + last_R[row] + 1
            self.finish[request] = "stop" if stop_RC[row, last_R[row]] else "length"
            self.finished += 1
        return ends_R | over_R

    def ended(self, request_R: Ints) -> NDArray[np.bool_]:
        """Which of these requests are known to have ended."""
        ended_R: NDArray[np.bool_] = self.lengths_of[request_R] > 0
        return ended_R

    def steps(self, most: int) -> int:
        """Tokens to draw until the next look: `most`, or what the row that has the most left may draw, if less."""
        left = self.limits[self.request[: self.count]] - self.drawn[: self.count]
        return min(most, int(left.max()))

    def go(self, steps: int) -> None:
        """All running rows are so many tokens farther."""
        self.length[: self.count] += steps
        self.drawn[: self.count] += steps

    def advance(self, ids_RC: Ints, logprobs_RC: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Keeps what all running rows have drawn; returns which have ended, bool [R]."""
        active = slice(0, self.count)
        ended = self.record(self.request[active], self.drawn[active], ids_RC, logprobs_RC)
        self.token[active] = ids_RC[:, -1]
        self.go(ids_RC.shape[1])
        return ended

    def going(self) -> Ints:
        """The rows that draw on: their requests have not ended, as far as is known, and may draw more."""
        request_R = self.request[: self.count]
        over_R = self.ended(request_R) | (self.drawn[: self.count] >= self.limits[request_R])
        return np.flatnonzero(~over_R)

    def state(self) -> Ints:
        """Position of the newest token, random stream and tokens drawn of each running row: [3, R]."""
        active = slice(0, self.count)
        streams = self.streams[self.request[active]]
        return np.stack([self.length[active], streams, self.drawn[active]])

    def add(self, request_N: Ints, length_N: Ints | list[int]) -> Ints:
        """A row for each of these requests, which have drawn one token after contexts of these lengths: its number."""
        added = np.arange(self.count, self.count + len(request_N))
        self.request[added], self.length[added] = request_N, length_N
        self.drawn[added] = self.resumed[request_N] + 1
        self.count += len(added)
        return added

    def remove(self, ended_R: NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """Drops ended rows, moving the last running rows into the gaps: returns (moved from, moved to)."""
        running = int((~ended_R).sum())
        target = np.flatnonzero(ended_R[:running])
        source = running + np.flatnonzero(~ended_R[running:])
        self.move(source, target)
        self.count = running
        return source, target

    def keep(self, kept: Ints) -> None:
        """Drops all rows but these, in their order."""
        self.move(kept, np.arange(len(kept)))
        self.count = len(kept)

    def put_back(self, row: int) -> int:
        """Takes the last row out of the batch, to be admitted again with what it has drawn; returns its request."""
        assert row == self.count - 1
        request = int(self.request[row])
        self.resumed[request] = self.drawn[row]
        self.count -= 1
        return request

    def so_far(self, request: int, context: Ids) -> Ids:
        """The request's context and what it has drawn: what a prefill has to run over."""
        drawn = int(self.resumed[request])
        if not drawn:
            return context
        start = int(self.offsets[request])
        return np.concatenate([context, self.ids[start : start + drawn]])

    def move(self, source: Ints, target: Ints) -> None:
        """Row `target[i]` becomes what row `source[i]` was."""
        for column in (self.request, self.token, self.length, self.drawn):
            column[target] = column[source]

    def rollout(self, request: int, version: int) -> Rollout:
        start = int(self.offsets[request])
        kept = slice(start, start + int(self.lengths_of[request]))
        return Rollout(self.ids[kept].copy(), self.logprobs[kept].copy(), self.finish[request], version)
