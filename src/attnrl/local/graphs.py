"""Steps replayed as CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

_WARM_UP = 1  # steps before a capture: lazy initialisation (cuBLAS handles, compiling) must not fall inside it


class Graphs:
    """Captured steps by key. A graph holds addresses: whoever moves what a step touches clears them."""

    def __init__(self, model: Any, device: torch.device, *, enabled: bool) -> None:
        self.model = model
        self.device = device
        self.enabled = enabled
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self._weights: tuple[int, ...] = ()
        self._captured = 0
        self._side: torch.cuda.Stream | None = None

    def clear(self) -> None:
        self._graphs.clear()

    def take_captured(self) -> int:
        """Graphs captured since this was last asked."""
        count, self._captured = self._captured, 0
        return count

    def weights_may_have_moved(self) -> None:
        """Drops the graphs if some weight now lives elsewhere. Weights changed in place need no new graphs."""
        weights = tuple(t.data_ptr() for t in [*self.model.parameters(), *self.model.buffers()])
        if weights != self._weights:
            self._graphs.clear()
            self._weights = weights

    def step(self, key: Any, body: Callable[[Any], None], state: Sequence[Tensor]) -> None:
        """Runs `body(key)` by its graph, captured the first time; `state` is what the body advances."""
        if not self.enabled:
            body(key)
            return
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._capture(key, body, state)
            if graph is None:
                body(key)
                return
            self._graphs[key] = graph
        graph.replay()

    def _capture(self, key: Any, body: Callable[[Any], None], state: Sequence[Tensor]) -> torch.cuda.CUDAGraph | None:
        """The step as a graph, or None, said once, where the model does something a graph cannot hold.

        Where memory runs out, a second try has all that was cached: a capture cannot free any.
        """
        before = [tensor.clone() for tensor in state]
        graph: torch.cuda.CUDAGraph | None = None
        try:
            try:
                graph = self._record(key, body, state, before)
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                graph = self._record(key, body, state, before)
            self._captured += 1
        except RuntimeError as error:
            self.enabled = False
            self._graphs.clear()
            warnings.warn(f"decode step runs eager, without CUDA graphs (slower): {error}", stacklevel=2)
            torch.cuda.synchronize(self.device)
        _restore(state, before)
        return graph

    def _record(
        self, key: Any, body: Callable[[Any], None], state: Sequence[Tensor], before: Sequence[Tensor]
    ) -> torch.cuda.CUDAGraph:
        """A warm-up and the capture, beside the current stream; both leave the state to be put back.

        What the warm-up writes to the cache lies past every row's length and is overwritten before it is read. It is
        not `torch.cuda.graph`, which first gives back all cached memory, the host's too: the next prefill would wait
        for it again.
        """
        current = torch.cuda.current_stream(self.device)
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)  # one for all: graphs share memory by stream
        self._side.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        pool = [held.pool() for held in self._graphs.values()][:1]
        try:
            with torch.cuda.stream(self._side):
                for _ in range(_WARM_UP):
                    _restore(state, before)
                    body(key)
                graph.capture_begin(*pool)
                whole = False
                try:
                    body(key)
                    whole = True
                finally:
                    with nullcontext() if whole else suppress(RuntimeError):  # a second error would hide the first
                        graph.capture_end()
        finally:
            current.wait_stream(self._side)
        return graph


def _restore(state: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)
