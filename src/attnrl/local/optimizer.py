"""AdamW over float32 master weights, whatever the model's own dtype.

A float32 parameter is its own master. A parameter in lower precision gets a float32 copy: gradients of every
microbatch are added to the copy's float32 gradient as soon as they exist, the step is made on the copy, and the result
is written back in place, so that tensors others hold (the sampler's recorded graphs) stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class MasterAdamW:
    """AdamW with float32 state; `step` clips by global norm and refuses non-finite gradients."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        clip_norm: float | None = 1.0,
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters: list[Tensor] = []
        self.clip_norm = clip_norm
        for parameter in self.parameters:
            if parameter.dtype == torch.float32:
                self.masters.append(parameter)
                continue
            master = parameter.detach().clone().float()
            self.masters.append(master)
            parameter.register_post_accumulate_grad_hook(_gather_into(master))
        # matrices decay, vectors (norms, biases) do not
        groups = [
            {"params": [m for m in self.masters if m.dim() >= 2], "weight_decay": weight_decay},
            {"params": [m for m in self.masters if m.dim() < 2], "weight_decay": 0.0},
        ]
        fused = self.masters[0].device.type == "cuda"
        self.adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, eps=eps, fused=fused)

    def zero_grad(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = None
            parameter.grad = None

    def coming_bytes(self) -> int:
        """Bytes of float32 gradients that the next `backward` will hold on to: of those that are not there yet."""
        return sum(4 * m.numel() for m in self.masters if m.grad is None)

    def gradient_norm(self) -> Tensor:
        """Global 2-norm of the gathered gradients, float32, on the device."""
        return torch.nn.utils.get_total_norm([m.grad for m in self.masters if m.grad is not None])

    def step(self, lr: float, norm: Tensor) -> None:
        """One update at this learning rate; gradients are scaled down to `clip_norm` first, then cleared."""
        if self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.clip_norm, norm)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.zero_grad()
        self.write_back()

    def write_back(self) -> None:
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
        self.write_back()


def _gather_into(master: Tensor) -> Any:
    def gather(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return gather
