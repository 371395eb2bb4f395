"""Which decoder layers run again in `backward` instead of keeping what they computed, and how many memory asks for.

Backward goes from the last layer to the first, so the first layers are those that run again: when their turn comes, the
others have given their memory back. Of long sequences, what fused attention returned is kept even then: it is as small
as the layer's input, and computing it costs the more the longer they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import attnrl.attention.flash  # noqa: F401 (defines attnrl.paths)
from attnrl.errors import ConfigError
from attnrl.policy.logprobs import chunk_tokens
from attnrl.policy.packing import Pack

RESERVE = 0.1  # of the device's memory, left free: pieces the allocator cannot join, and workspaces of kernels
ATTENTION = [torch.ops.attnrl.paths.default, torch.ops.aten._flash_attention_forward.default]
ATTENTION += [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
# Tokens of a microbatch's longest sequence from which attention is kept: on an H200 that cost 4 % of the learner's
# speed at 2,048 tokens a response and gained 4 % at 8,192, by aten's attention (a trial).
LONG = 4096
LOGIT_ARRAYS = 4  # float32 arrays as large as a chunk's logits: they, scaled, as probabilities, their gradient


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that one decoder layer holds for `backward`, per token of the pack."""

    whole: float  # everything its gradient needs
    entry: float  # its inputs, from which it can run again, and what attention returned, whether that is kept or not


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a Hugging Face model, first to last: the outermost list with one module for each."""
    wanted = model.config.get_text_config().num_hidden_layers
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == wanted)
    return list(next(lists, []))


def fewest_layers(kept: Kept, *, layers: int, tokens: int, logits: float, free: float) -> int:
    """How many of the first layers must run again so that a microbatch fits into `free` bytes; all, if none do.

    Held at a time: what the other layers keep, the inputs of those that run again, one layer's work once more for the
    gradients in progress, and `logits` bytes of a chunk of logits.
    """
    for first in range(layers):
        held = first * kept.entry + (max(layers - first, 1) + 1) * kept.whole
        if tokens * held + logits <= free:
            return first
    return layers


def free_bytes(device: torch.device) -> float | None:
    """Bytes of the device that a microbatch may take, `RESERVE` left out; None on a CPU, whose memory others share."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(free + unused - RESERVE * total)


class Recompute:
    """Runs the decoder layers of one model: plainly, again in `backward`, or while what they keep is counted."""

    def __init__(self, model: nn.Module, policy: str | int) -> None:
        """`policy`: "none", "all", a number of layers, or "auto"."""
        self.model = model
        self.layers = layers_of(model)
        self.policy = policy
        self.first = 0  # so many layers run again, while open
        self.keeps_attention = False  # they keep what it returned, while open
        self.kept: Kept | None = None  # once counted
        self.used: list[int] = []  # layers that ran again, of each microbatch
        self._counted: list[Kept] | None = None  # by layer, in bytes of the pack; while counting
        key = "update.gradient_checkpointing"
        if not self.layers and policy != "none":
            raise ConfigError(f'the decoder layers of {type(model).__name__} are not to be found: set {key} = "none"')
        if isinstance(policy, int) and policy > len(self.layers):
            raise ConfigError(f'{key} = {policy}, but the model has {len(self.layers)} layers: set it to "all"')

    def wanted(self, pack: Pack, forward: Callable[[], Any], *, coming: float, chunk: int | None) -> int:
        """How many layers run again over this pack.

        `forward` runs over it without gradient, once, to measure what layers keep. `coming`: bytes that `backward` will
        hold on to. `chunk`: tokens whose logits are held at a time.
        """
        if isinstance(self.policy, int):
            return self.policy
        free = free_bytes(pack.ids_T.device) if self.policy == "auto" else None
        if free is None:
            return 0 if self.policy == "none" else len(self.layers)
        kept = self.kept or self._count(pack.tokens, forward)
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        logits = LOGIT_ARRAYS * 4 * vocabulary * min(len(pack.source_U), chunk or chunk_tokens(vocabulary))
        return fewest_layers(kept, layers=len(self.layers), tokens=pack.tokens, logits=logits, free=free - coming)

    @contextmanager
    def open(self, first: int, pack: Pack) -> Iterator[None]:
        """While open, the first layers run again over this pack in `backward`, which belongs inside."""
        self.first, self.keeps_attention = first, max(pack.lengths) >= LONG
        self.used.append(first)
        with self._installed():
            yield

    def metrics(self) -> dict[str, float]:
        """Of the microbatches since it was last asked."""
        found = {"train/recomputed_layers": sum(self.used) / max(1, len(self.used))}
        if self.kept is not None:
            found["train/layer_token_bytes"] = self.kept.whole
        self.used = []
        return found

    def run(self, index: int, forward: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """forward(*args, **given), which is layer `index`; gradients reach positional arguments."""
        if self._counted is not None:
            return self._run_counted(self._counted, forward, *args, **given)
        if index < self.first and torch.is_grad_enabled():
            how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            how |= {"context_fn": _attention_kept} if self.keeps_attention else {}
            return checkpoint(forward, *args, **how, **given)
        return forward(*args, **given)

    def _count(self, tokens: int, forward: Callable[[], Any]) -> Kept:
        self._counted = []
        with self._installed():
            forward()
            most = Kept(max(k.whole for k in self._counted), max(k.entry for k in self._counted))
        self.kept = Kept(most.whole / tokens, most.entry / tokens)
        return self.kept

    def _run_counted(self, counted: list[Kept], forward: Callable[..., Any], *args: Any, **given: Any) -> Any:
        given_all = (t for t in tree_leaves(given) if isinstance(t, Tensor))  # to every layer: tables of the rotation
        there = {t.untyped_storage().data_ptr() for t in (*self.model.parameters(), *given_all)}
        found: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in there:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        fresh = [a.detach().requires_grad_() if _is_float(a) else a for a in args]
        attention = _Attention()
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), attention:
            out = forward(*fresh, **given)
        counted.append(Kept(sum(found.values()), attention.nbytes + sum(a.nbytes for a in fresh if _is_float(a))))
        return tree_map_only(Tensor, Tensor.detach, out)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        before = [vars(layer).get("forward") for layer in self.layers]
        for i, layer in enumerate(self.layers):
            vars(layer)["forward"] = partial(self.run, i, layer.forward)
        try:
            yield
        finally:
            self.first, self.keeps_attention, self._counted = 0, False, None
            for layer, own in zip(self.layers, before, strict=True):
                del vars(layer)["forward"]
                if own is not None:
                    vars(layer)["forward"] = own


_attention_kept = partial(create_selective_checkpoint_contexts, ATTENTION)


class _Attention(TorchDispatchMode):  # type: ignore[misc]  # torch has no types for it
    """Counts the bytes that fused attention returns."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in ATTENTION:
            self.nbytes += sum(t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor))
        return out


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
