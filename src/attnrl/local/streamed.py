"""AdamW whose state does not lie in float32 beside the model: a step goes over it slice by slice.

offloaded       masters and moments are float32 in host memory, where the step is made too: gradients go down and
                weights come back. The device holds weights and float32 gradients alone.
in_eight_bits   masters stay on the device; each moment is a byte a weight and a float32 scale a block.

What a step computes is torch's own AdamW on the slice, so an offloaded step is the plain one.

Shapes: N weights of a slice, B blocks of `BLOCK` weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.adamw import adamw

SLICE = 2**24  # weights at a time: what a step needs beside the state is a few arrays of this size
BLOCK = 256  # weights that share a scale
OCTAVES = 12  # between the largest and the smallest first moment of a block; of second moments twice as many


@dataclass(frozen=True, slots=True)
class Rates:
    """AdamW's constants."""

    beta1: float
    beta2: float
    eps: float
    decay: float

    def decay_of(self, weight: Tensor) -> float:
        """Matrices decay, vectors (norms, biases) do not."""
        return self.decay if len(weight.shape) >= 2 else 0.0


@dataclass(slots=True, eq=False)
class Slot:
    """A float32 gradient on the model's device."""

    grad: Tensor | None = None


class Moments(Protocol):
    """Both moments of every parameter."""

    def read(self, index: int, part: slice) -> tuple[Tensor, Tensor]:
        """Those of a part of parameter `index`, in float32. ([N], [N])"""

    def write(self, index: int, part: slice, first_N: Tensor, second_N: Tensor) -> None:
        """Keep what `read` gave and a step has changed."""

    def state(self) -> list[Tensor]:
        """The tensors that hold them, in a fixed order."""


class Streamed:
    """Masters, moments and the number of steps of each parameter."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], masters: list[Tensor], moments: Moments, rates: Rates
    ) -> None:
        self.parameters = parameters
        self.masters = masters
        self.moments = moments
        self.rates = rates
        self.holders: list[Any] = [p if p.dtype == torch.float32 else Slot() for p in parameters]
        self.steps = [0] * len(masters)
        self.fused = parameters[0].device.type == "cuda"  # on the host too: there it is one pass over memory
        away = parameters[0].device != masters[0].device
        size = min(SLICE, max(p.numel() for p in parameters)) if away else 0
        # only what crosses the bus is pinned: torch rounds a pinned tensor up to a power of two
        self.down_N = torch.empty(size, dtype=torch.float32, pin_memory=away)
        self.up_N = torch.empty(size, dtype=parameters[0].dtype, pin_memory=away)

    def step(self, lr: float) -> None:
        """One update of masters, moments and weights by the gradients that are there."""
        for index, (master, holder) in enumerate(zip(self.masters, self.holders, strict=True)):
            if holder.grad is None:
                continue
            gradient, weights = holder.grad.reshape(-1), master.detach().view(-1)
            decay = self.rates.decay_of(master)
            for start in range(0, len(weights), SLICE):
                part = slice(start, min(start + SLICE, len(weights)))
                moments = self.moments.read(index, part)
                self._adamw(index, weights[part], self._down(gradient[part]), moments, lr, decay)
                self.moments.write(index, part, *moments)
                self._up(index, part)
            self.steps[index] += 1

    def _adamw(
        self, index: int, weights_N: Tensor, gradient_N: Tensor, moments: tuple[Tensor, Tensor], lr: float, decay: float
    ) -> None:
        first_N, second_N = moments
        rates = self.rates
        done = torch.tensor(float(self.steps[index]), device=weights_N.device if self.fused else None)
        adamw(
            [weights_N], [gradient_N], [first_N], [second_N], [], [done],
            foreach=False, fused=self.fused, amsgrad=False, maximize=False,
            beta1=rates.beta1, beta2=rates.beta2, lr=lr, weight_decay=decay, eps=rates.eps,
        )  # fmt: skip

    def _down(self, gradient_N: Tensor) -> Tensor:
        """The gradient where the masters are."""
        return self.down_N[: len(gradient_N)].copy_(gradient_N) if len(self.down_N) else gradient_N

    def _up(self, index: int, part: slice) -> None:
        """Copy a part of a master into the model, in place."""
        parameter, master = self.parameters[index], self.masters[index]
        if master is parameter:
            return
        fresh_N = master.view(-1)[part]
        if len(self.up_N):
            fresh_N = self.up_N[: len(fresh_N)].copy_(fresh_N)
        parameter.data.view(-1)[part].copy_(fresh_N)

    def state_dict(self) -> dict[str, Any]:
        masters = [None if m is p else m for p, m in zip(self.parameters, self.masters, strict=True)]
        return {"masters": masters, "moments": self.moments.state(), "steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])
        for mine, saved in zip(self.moments.state(), state["moments"], strict=True):
            mine.copy_(saved)
        for index, (master, saved) in enumerate(zip(self.masters, state["masters"], strict=True)):
            if saved is not None:
                master.copy_(saved)
            for start in range(0, master.numel(), SLICE):
                self._up(index, slice(start, start + SLICE))


class HostMoments:
    """Float32, in host memory."""

    def __init__(self, masters: Sequence[Tensor]) -> None:
        self.first = [torch.zeros(m.numel()) for m in masters]
        self.second = [torch.zeros(m.numel()) for m in masters]

    def read(self, index: int, part: slice) -> tuple[Tensor, Tensor]:
        return self.first[index][part], self.second[index][part]

    def write(self, index: int, part: slice, first_N: Tensor, second_N: Tensor) -> None:
        """Nothing: `read` gave views."""

    def state(self) -> list[Tensor]:
        return [*self.first, *self.second]


class ByteMoments:
    """A byte a weight, and for each block the largest absolute value in it."""

    def __init__(self, masters: Sequence[Tensor]) -> None:
        device = masters[0].device
        self.levels = [levels.to(device) for levels in (first_levels(), second_levels())]
        self.codes: list[list[Tensor]] = [[], []]  # [B, BLOCK]
        self.scales: list[list[Tensor]] = [[], []]  # [B, 1]
        for codes, scales in zip(self.codes, self.scales, strict=True):
            for blocks in (-(-m.numel() // BLOCK) for m in masters):
                codes.append(torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=device))
                scales.append(torch.zeros(blocks, 1, device=device))

    def read(self, index: int, part: slice) -> tuple[Tensor, Tensor]:
        blocks, size = _blocks(part), part.stop - part.start
        pairs = zip(self.levels, self.codes, self.scales, strict=True)
        first_N, second_N = (
            (levels[codes[index][blocks].int()] * scales[index][blocks]).view(-1)[:size]
            for levels, codes, scales in pairs
        )
        return first_N, second_N

    def write(self, index: int, part: slice, first_N: Tensor, second_N: Tensor) -> None:
        blocks = _blocks(part)
        for of, values_N in enumerate((first_N, second_N)):
            codes_B, scales_B = quantised(values_N, self.levels[of])
            self.codes[of][index][blocks] = codes_B
            self.scales[of][index][blocks] = scales_B

    def state(self) -> list[Tensor]:
        return [tensor for kinds in (self.codes, self.scales) for kind in kinds for tensor in kind]


def quantised(values_N: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [B, BLOCK] and scales [B, 1]: the level nearest to each value's share of the largest in its block."""
    values_B = F.pad(values_N, (0, -len(values_N) % BLOCK)).view(-1, BLOCK)
    scales_B = values_B.abs().amax(1, keepdim=True)
    shares_B = values_B / scales_B.clamp_min(torch.finfo(torch.float32).tiny)
    borders = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(shares_B, borders, out_int32=True).to(torch.uint8), scales_B


@cache
def first_levels() -> Tensor:
    """0 and, on either side, 127 levels in equal ratios down from 1. [255]"""
    up = torch.exp2(torch.linspace(-OCTAVES, 0, 127, dtype=torch.float64)).float()
    return torch.cat([-up.flip(0), torch.zeros(1), up])


@cache
def second_levels() -> Tensor:
    """256 levels in equal ratios down from 1; not 0, by whose root a step would be divided. [256]"""
    return torch.exp2(torch.linspace(-2 * OCTAVES, 0, 256, dtype=torch.float64)).float()


def offloaded(parameters: Sequence[nn.Parameter], rates: Rates) -> Streamed:
    masters = [p.detach().to("cpu", torch.float32, copy=True) for p in parameters]
    return Streamed(parameters, masters, HostMoments(masters), rates)


def in_eight_bits(parameters: Sequence[nn.Parameter], rates: Rates) -> Streamed:
    masters = masters_beside(parameters)
    return Streamed(parameters, masters, ByteMoments(masters), rates)


def masters_beside(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Float32 parameters themselves, copies of the others, on the model's device."""
    return [p if p.dtype == torch.float32 else p.detach().clone().float() for p in parameters]


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))
