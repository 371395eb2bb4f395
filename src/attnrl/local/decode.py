"""The decode step: one token for each running row, eager or as a replayed CUDA graph.

Shapes: R rows of the step, C steps between two looks from the host, V vocabulary.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnrl.local.cache import Blocks, DecodeAttention, Ints, KVCache, attending
from attnrl.local.draw import draw, uniforms
from attnrl.types import Sampling

_WARM_UP = 2  # steps before a capture: lazy initialisation (cuBLAS handles, autotuning) must not fall inside it


class Decoder:
    """Device state of the running rows and the step that advances it without asking the host.

    The state is four int64 vectors: the newest token of each row (drawn, not yet in the cache), its position, its
    random stream, and how many tokens the row has drawn. Rows beyond the running ones are idle: they sit at position
    0 and draw tokens nobody reads, so that shapes stay fixed and few graphs serve all steps.
    """

    def __init__(self, model: Any, device: torch.device, *, check_every: int, cuda_graphs: bool) -> None:
        self.model = model
        self.device = device
        self.check_every = check_every
        self.cuda_graphs = cuda_graphs
        self.captured = 0
        # Between two looks a finished row runs on, and must not ask for a position the model does not have.
        most = getattr(model.config, "max_position_embeddings", None)
        self._last_position = None if check_every == 1 or most is None else most - 1
        self.cache: KVCache | None = None
        self._state_4R = torch.zeros(4, 0, dtype=torch.int64, device=device)
        self._column_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._ids_RC = torch.zeros(0, check_every, dtype=torch.int64, device=device)
        self._logprobs_RC = torch.zeros(0, check_every, dtype=torch.float32, device=device)
        self._graphs: dict[tuple[Blocks, Sampling], torch.cuda.CUDAGraph] = {}
        self._weights: tuple[int, ...] = ()

    def use_cache(self, cache: KVCache | None) -> None:
        """Sets the cache the rows live in. Graphs hold addresses, so another cache needs other graphs."""
        self._graphs.clear()
        self.cache = cache
        rows = 0 if cache is None else cache.rows
        if rows != self._state_4R.shape[1]:
            self._state_4R = torch.zeros(4, rows, dtype=torch.int64, device=self.device)
            self._ids_RC = torch.zeros(rows, self.check_every, dtype=torch.int64, device=self.device)
            self._logprobs_RC = torch.zeros(rows, self.check_every, dtype=torch.float32, device=self.device)

    def weights_may_have_moved(self) -> None:
        """Drops the graphs if some weight now lives elsewhere. Weights changed in place need no new graphs."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        weights = tuple(t.data_ptr() for t in tensors)
        if weights != self._weights:
            self._graphs.clear()
            self._weights = weights

    def place(self, tokens: Ints, lengths: Ints, streams: Ints, drawn: Ints) -> None:
        """Sets the state of the first rows from the host."""
        state = torch.from_numpy(np.stack([tokens, lengths, streams, drawn]))
        self._state_4R[:, : len(tokens)] = state.to(self.device)

    def run(self, steps: int, running: int, blocks: Blocks, sampling: Sampling) -> tuple[Ints, NDArray[np.float32]]:
        """Advances all rows by `steps` tokens; returns ids and log-probs [running, steps] of the running ones.

        No running row may reach its block's span on the way.
        """
        rows = blocks[-1][1]
        assert self.cache is not None
        assert steps <= self.check_every
        assert all(span <= self.cache.capacity for _, _, span in blocks)
        self._column_1.zero_()
        if rows > running:
            self._state_4R[1, running:rows] = 0
        for _ in range(steps):
            if self.cuda_graphs:
                self._replay(blocks, sampling)
            else:
                self._step(blocks, sampling)
        ids_RC = self._ids_RC[:running, :steps].cpu().numpy()
        return ids_RC, self._logprobs_RC[:running, :steps].cpu().numpy()

    def _step(self, blocks: Blocks, sampling: Sampling) -> None:
        """One token for each row. Everything stays on the device, in place: the whole step can be captured."""
        assert self.cache is not None
        rows = blocks[-1][1]
        tokens_R, lengths_R, streams_R, drawn_R = self._state_4R[:, :rows]
        position_R = lengths_R if self._last_position is None else lengths_R.clamp(max=self._last_position)
        with attending(DecodeAttention(self.cache, lengths_R, blocks)):
            logits_R1V: Tensor = self.model(
                input_ids=tokens_R[:, None], position_ids=position_R[:, None], use_cache=False
            ).logits
        ids_R, logprobs_R = draw(logits_R1V[:, -1], uniforms(streams_R, drawn_R), sampling)
        self._ids_RC[:rows].index_copy_(1, self._column_1, ids_R[:, None])
        self._logprobs_RC[:rows].index_copy_(1, self._column_1, logprobs_R[:, None])
        tokens_R.copy_(ids_R)
        self._state_4R[1::2, :rows].add_(1)  # position and count
        self._column_1.add_(1)

    def _replay(self, blocks: Blocks, sampling: Sampling) -> None:
        key = (blocks, sampling)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._capture(blocks, sampling)
            if graph is None:
                self._step(blocks, sampling)
                return
            self._graphs[key] = graph
        graph.replay()

    def _capture(self, blocks: Blocks, sampling: Sampling) -> torch.cuda.CUDAGraph | None:
        """The step as a graph, or None, said once, where the model does something a graph cannot hold.

        The warm-up steps advance the state, so it is put back; what they wrote to the cache lies past every row's
        length and is overwritten before it is read.
        """
        before = self._state_4R.clone(), self._column_1.clone()
        current = torch.cuda.current_stream(self.device)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        try:
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP):
                    self._state_4R.copy_(before[0])
                    self._column_1.copy_(before[1])
                    self._step(blocks, sampling)
            current.wait_stream(side)
            with torch.cuda.graph(graph, pool=pool):
                self._step(blocks, sampling)
        except RuntimeError as error:
            self.cuda_graphs = False
            self._graphs.clear()
            warnings.warn(f"decode step runs eager, without CUDA graphs (slower): {error}", stacklevel=2)
            torch.cuda.synchronize(self.device)
            graph = None
        self._state_4R.copy_(before[0])
        self._column_1.copy_(before[1])
        if graph is not None:
            self.captured += 1
        return graph
