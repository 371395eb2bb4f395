"""The model's forward over pages, fused where it can be, and the draw that ends a step.

Shapes: T tokens, R rows, V vocabulary, C columns of the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnrl.attention.decoder import evaluating, remembers, vocabulary_of
from attnrl.attention.interface import Layer, attending
from attnrl.attention.layout import prefill_attention
from attnrl.attention.paged import has_kernels
from attnrl.attention.pages import LayerShape, PagePool, pages_for, slots_of
from attnrl.attention.trie import query_blocks
from attnrl.errors import ConfigError
from attnrl.local.draw import draw
from attnrl.local.fused import FusedDecoder, Recorded, agrees, fuse
from attnrl.local.memory import Memory, logits
from attnrl.local.stats import step_rows
from attnrl.local.wide import InFloat32, widens
from attnrl.types import Sampling

_TEXT = 40  # tokens over which the fused forward is compared with the model's own


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """Within it the model is in eval mode, keeps no gradients and is open to our attention; restored afterwards."""
    # With a mask, the memory-efficient kernel is the fused one; cuDNN would build a plan for every new shape.
    cuda = next(model.parameters()).device.type == "cuda"
    kernels = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if cuda else nullcontext()
    with evaluating(model), attending(model, None), kernels:
        yield


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """What a batch of rows is built for."""

    model: Any
    layers: tuple[LayerShape, ...]  # of the cache, and its dtype
    dtype: torch.dtype
    stops_V: NDArray[np.bool_]  # tokens that end a response
    rows: int  # most that run at once
    prefill_tokens: int  # of one forward over contexts
    cache_bytes: int | None  # None: a share of what is free
    check_every: int = 1  # most decode steps between two looks for finished rows
    cuda_graphs: bool = False
    state_bytes: int = 0  # of what a row's layers remember beside attention

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def memory_bytes(self, rows: int) -> int:
        """Of what the rows of a step remember, twice: a step that is captured is undone from a copy."""
        return 2 * self.state_bytes * step_rows(rows)

    def budget(self, held: int) -> int:
        """Bytes that a cache may take that holds so many now: by default 4 GiB on CPU, half of what is free on CUDA."""
        if self.cache_bytes is not None:
            return self.cache_bytes
        if self.device.type != "cuda":
            return 4 << 30
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(torch.cuda.mem_get_info(self.device)[0] + kept + held) // 2


class ProbeAttention:
    """Learns the layers' shapes and dtype from one forward over two tokens."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.dtype = torch.float32

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer.index in self.shapes:
            raise ConfigError(
                f"the model runs attention layer {layer.index} twice in a pass, which the local sampler cannot"
            )
        self.shapes[layer.index] = LayerShape(k.shape[1], k.shape[3], v.shape[3])
        self.dtype = k.dtype
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(1, 2)

    def layers(self) -> tuple[LayerShape, ...]:
        if sorted(self.shapes) != list(range(len(self.shapes))) or not self.shapes:
            raise ConfigError(
                "the model does not run its attention through transformers' attention interface, so the local sampler "
                "cannot cache it; use a decoder-only model with `_supports_attention_backend`"
            )
        return tuple(self.shapes[layer] for layer in range(len(self.shapes)))


class Forward:
    """Next-token logits over pages. `fused` is the fused forward, where the model's modules and numbers allow it."""

    def __init__(self, model: Any, layers: Sequence[LayerShape], dtype: torch.dtype) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.fused: FusedDecoder | None = None
        fused = None if remembers(model) else fuse(model, self.device)
        if fused is not None:
            self._compare(fused, layers, dtype)

    def refresh(self, positions: int) -> None:
        """Takes over the weights as they are now, for tokens at so many positions."""
        if self.fused is not None:
            self.fused.refresh(positions)

    def release(self) -> None:
        """Frees what `refresh` copies."""
        if self.fused is not None:
            self.fused.release()

    def logits(
        self, tokens_T: Tensor, positions_T: Tensor, plan: Any, ends: Tensor | None, memory: Memory | None = None
    ) -> Tensor:
        """Next-token logits after the packed tokens `ends`, the last of their runs, of a prefill, or after every row's
        token; by the fused forward also after every token of a prefill. `memory`: of the rows, or of a prefill's one.
        """
        if self.fused is not None:
            hidden = self.fused.hidden(tokens_T, positions_T, plan, ends)
            found: Tensor = self.model.get_output_embeddings()(hidden)
            return found
        if ends is None:
            given = {"input_ids": tokens_T[:, None], "position_ids": positions_T[:, None]}
            return logits(self.model, plan, memory, **given)[:, -1]
        given = {"input_ids": tokens_T[None], "position_ids": positions_T[None], "logits_to_keep": ends}
        return logits(self.model, plan, memory, **given)[0]

    def _compare(self, fused: FusedDecoder, layers: Sequence[LayerShape], dtype: torch.dtype) -> None:
        """Keeps the fused forward if it gives the model's own logits on a short text, up to rounding."""
        most = getattr(self.model.config, "max_position_embeddings", None) or _TEXT
        count = min(_TEXT, most)
        vocabulary = vocabulary_of(self.model)
        positions = torch.arange(count, device=self.device)
        tokens = positions * 7919 % vocabulary

        def recorded(dtype: torch.dtype) -> Recorded:
            pool = PagePool(layers, pages_for(count) + 1, dtype, self.device)
            pages = pool.take(pages_for(count))
            slots, nothing = slots_of(pages, np.arange(count)), np.zeros((2, 0), np.int64)
            return Recorded(prefill_attention(pool, [pages], slots, nothing, [query_blocks(0, 0, count, 0)]))

        def truth() -> Tensor:
            self.fused = None
            with sampling_mode(self.model), InFloat32():
                return with_last(self.logits(tokens, positions, recorded(torch.float32), positions).float())

        def with_last(logits_TV: Tensor) -> Tensor:
            return torch.cat([logits_TV, logits_TV[-1:]])  # the fused forward has a way of its own for last tokens

        own = recorded(dtype)
        with sampling_mode(self.model):
            fused.refresh(count)
            theirs = with_last(self.logits(tokens, positions, own, positions))
            fused.scoring, self.fused = own.layers, fused
            ours = torch.cat([self.logits(tokens, positions, own.plan, ends) for ends in (None, positions[-1:])])
        asked = None if dtype == torch.float32 or not widens(self.model) else truth
        self.fused = fused if agrees(ours, theirs, dtype=dtype, truth=asked) else None


def draw_column(
    logits_RV: Tensor,
    uniform_RC: Tensor,
    column_1: Tensor,
    tokens_R: Tensor,
    lengths_R: Tensor,
    ids_RC: Tensor,
    logprobs_RC: Tensor,
    sampling: Sampling,
) -> None:
    """Draws a token a row at the column's uniform number; sets token, length, and the column of the outputs."""
    if sampling.temperature > 0 and not sampling.top_k and has_kernels(logits_RV.device):
        from attnrl.local.draw_triton import draw_into

        state = (uniform_RC, column_1, tokens_R, lengths_R, ids_RC, logprobs_RC)
        draw_into(logits_RV, *state, sampling.temperature, sampling.top_p)
        return
    uniform_R = uniform_RC.index_select(1, column_1)[:, 0]
    ids_R, logprobs_R = draw(logits_RV, uniform_R, sampling)
    ids_RC.index_copy_(1, column_1, ids_R[:, None])
    logprobs_RC.index_copy_(1, column_1, logprobs_R[:, None])
    tokens_R.copy_(ids_R)
    lengths_R.add_(1)
