"""AdamW over float32 master weights, whatever the model's own dtype.

A float32 parameter is its own master. A parameter in lower precision gets a float32 copy: gradients of every
microbatch are added to a float32 gradient as soon as they exist, the step is made on the copy, and the result
is written back in place, so that tensors others hold (the sampler's recorded graphs) stay valid.

Where masters and moments lie is the choice of `update.optimizer`: beside the model here, or as `streamed` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attnrl.errors import ConfigError
from attnrl.local.streamed import Rates, Slot, in_eight_bits, masters_beside, offloaded


class State(Protocol):
    """Masters and moments of some parameters."""

    masters: list[Tensor]
    holders: list[Any]  # by parameter: what has its gathered float32 gradient as `grad`

    def step(self, lr: float) -> None:
        """One update of masters and parameters by the gradients."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class MasterAdamW:
    """AdamW with float32 masters; `step` clips by global norm and refuses non-finite gradients."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        kind: str = "adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        clip_norm: float | None = 1.0,
    ) -> None:
        """`kind`: "adamw", "adamw_8bit" or "adamw_offloaded"."""
        self.kind = kind
        self.parameters = [p for p in parameters if p.requires_grad]
        self.clip_norm = clip_norm
        self.state = STATES[kind](self.parameters, Rates(*betas, eps, weight_decay))
        for parameter, holder in zip(self.parameters, self.state.holders, strict=True):
            if holder is not parameter:
                parameter.register_post_accumulate_grad_hook(_gather_into(holder))

    @property
    def masters(self) -> list[Tensor]:
        return self.state.masters

    def zero_grad(self) -> None:
        for holder, parameter in zip(self.state.holders, self.parameters, strict=True):
            holder.grad = None
            parameter.grad = None

    def coming_bytes(self) -> int:
        """Bytes of float32 gradients that the next `backward` will hold on to: of those that are not there yet."""
        pairs = zip(self.state.holders, self.parameters, strict=True)
        return sum(4 * parameter.numel() for holder, parameter in pairs if holder.grad is None)

    def gradient_norm(self) -> Tensor:
        """Global 2-norm of the gathered gradients, float32, on the device."""
        return torch.nn.utils.get_total_norm([h.grad for h in self.state.holders if h.grad is not None])

    def step(self, lr: float, norm: Tensor) -> None:
        """One update at this learning rate; gradients are scaled down to `clip_norm` first, then cleared."""
        if self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.state.holders, self.clip_norm, norm)
        self.state.step(lr)
        self.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **self.state.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the state was taken; of another kind it is refused."""
        kind = state.get("kind", "adamw")  # the only one there was before kinds had names
        if kind != self.kind:
            raise ConfigError(
                f"update.optimizer: the checkpoint is of {kind!r}, is now {self.kind!r}; its state does not fit: set "
                "it back, or start a new run from the checkpoint's model"
            )
        self.state.load_state_dict(state)


class Resident:
    """Masters and both moments in float32, where the model is."""

    def __init__(self, parameters: list[nn.Parameter], rates: Rates) -> None:
        self.parameters = parameters
        self.masters = masters_beside(parameters)
        self.holders: list[Any] = list(self.masters)
        groups = [
            {"params": [m for m in self.masters if m.dim() >= 2], "weight_decay": rates.decay},
            {"params": [m for m in self.masters if m.dim() < 2], "weight_decay": 0.0},
        ]
        fused = self.masters[0].device.type == "cuda"
        betas = rates.beta1, rates.beta2
        self.adam = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=0.0, betas=betas, eps=rates.eps, fused=fused
        )

    def step(self, lr: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self._write_back()

    def _write_back(self) -> None:
        """Copy the masters into the model, in place."""
        pairs = [(p.data, m) for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])

    def state_dict(self) -> dict[str, Any]:
        masters = [None if m is p else m for p, m in zip(self.parameters, self.masters, strict=True)]
        return {"adam": self.adam.state_dict(), "masters": masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for parameter, master, saved in zip(self.parameters, self.masters, state["masters"], strict=True):
            if master is not parameter:
                master.copy_(saved)
        self._write_back()


STATES: dict[str, Callable[[list[nn.Parameter], Rates], State]] = {
    "adamw": Resident,
    "adamw_8bit": in_eight_bits,
    "adamw_offloaded": offloaded,
}


def _gather_into(holder: Tensor | Slot) -> Any:
    def gather(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if holder.grad is None:
            holder.grad = parameter.grad.float()
        else:
            holder.grad.add_(parameter.grad)
        parameter.grad = None

    return gather
