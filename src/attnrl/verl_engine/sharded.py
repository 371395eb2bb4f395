"""Score and learn over one FSDP2 module, called on every rank in step. torch and attnrl only: no verl, no Ray.

FSDP2 gathers layers by collectives, so every rank must run as many forwards: ranks with fewer packs run fillers. An
error on one rank alone would leave the others waiting: inputs are checked in the driver, before the call.

Shapes: N loss tokens of a microbatch.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from attnrl import scoring
from attnrl.attention.decoder import check_head, lone_from
from attnrl.attention.paths import path_attention
from attnrl.attention.trie import bins_by_budget
from attnrl.config import UpdateConfig
from attnrl.local.learner import UpdateMetrics
from attnrl.local.logprobs import token_logprobs
from attnrl.local.packing import Pack, pack
from attnrl.policy.objective import LossSums, Objective, loss_sums
from attnrl.scoring.scorer import ScoreReport
from attnrl.types import Sample, ScoreRequest, Scores, Scoring, Step, as_floats, as_ids

FILLER = Sample(as_ids([0]), as_ids([0]), as_floats([0.0]), as_floats([0.0]), "")
Sync = Callable[[bool], AbstractContextManager[None]]  # whether gradients are reduced over ranks after this one


class BareHead:
    """The output head without FSDP2's hooks. verl shards it apart from the root: each call of it would be a collective,
    and ranks run it over different numbers of chunks, in backward too."""

    def __init__(self, head: Any) -> None:
        self.head = head

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.head.weight
        return weight

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head.forward(hidden)
        return logits


def prepare(module: Any, *, check: bool = True) -> None:
    """Once, on every rank and outside of any attention of ours: check the head, then take its hooks away and let
    `inside` count as a forward."""
    if hasattr(module, "attnrl_inside"):
        return
    if check:
        module.set_reshard_after_forward(False, recurse=False)  # the check calls root and head apart
        check_head(module)
        module.reshard()
    head = module.get_output_embeddings()
    if isinstance(head, FSDPModule):
        bare = BareHead(head)
        module.get_output_embeddings = lambda: bare
    module.attnrl_inside = types.MethodType(lambda self, work: work(self), module)
    register_fsdp_forward_method(module, "attnrl_inside")


def inside(module: Any, work: Callable[[Any], Any]) -> Any:
    """work(module) as if it were the module's forward: FSDP2 gathers the root's parameters around it, and the head's,
    which stay until the end of backward. The module is prepared."""

    def with_head(model: Any) -> Any:
        found = model.get_output_embeddings()
        head = found.head if isinstance(found, BareHead) else None
        if head is not None:
            head.unshard()
        answer = work(model)
        if head is not None and not torch.is_grad_enabled():
            head.reshard()
        return answer

    return module.attnrl_inside(with_head)


def over_ranks(values: Sequence[float], device: torch.device, op: Any = None) -> list[float]:
    """The values added up over ranks, or reduced by `op`."""
    tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op or dist.ReduceOp.SUM)
    return [float(value) for value in tensor]


def most(value: float, device: torch.device) -> float:
    return over_ranks([value], device, dist.ReduceOp.MAX)[0]


def score(
    module: Any, requests: Sequence[ScoreRequest], scoring_: Scoring, *, token_budget: int, device: torch.device
) -> tuple[list[Scores], ScoreReport]:
    """Scores of this rank's requests, by attnrl.scoring as it is, and what they cost."""
    prepare(module)
    options: dict[str, Any] = {
        "delta": scoring_.delta,
        "key_reduce": scoring_.key_reduce,
        "temperature": scoring_.temperature,
        "fci": scoring_.fci,
    }
    lengths = [len(r.prompt) + len(r.response) for r in requests]
    own = len(bins_by_budget(lengths, token_budget, lone_from(module)))
    idle = int(most(own, device)) - own
    filler = ScoreRequest(as_ids([0]), as_ids([0]), (Step(0, 1),))
    report = ScoreReport()

    def work(model: Any) -> list[Scores]:
        found = scoring.score(model, requests, token_budget=token_budget, report=report, **options)
        for _ in range(idle):
            scoring.score(model, [filler], **options)
        return found

    found = inside(module, work)
    module.reshard()
    return found, report


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """This rank's share of one minibatch: its microbatches, and how many forwards every rank runs."""

    packs: list[Pack]
    forwards: int
    units: float  # over all ranks: what the mean of the loss runs over
    filler: Pack

    @property
    def all(self) -> list[Pack]:
        """As many on every rank."""
        return [*self.packs, *[self.filler] * (self.forwards - len(self.packs))]


@dataclass(frozen=True, slots=True, eq=False)
class Rank:
    """One FSDP2 module on one rank, and how the policy is updated."""

    module: Any
    device: torch.device
    options: UpdateConfig
    objective: Objective
    temperature: float

    def lay_out(self, packs: Sequence[Sequence[Sample]], *, share: bool) -> Minibatch:
        """The microbatches on the device; a collective."""
        mine = [pack(samples, range(len(samples)), self.device, share_prefixes=share) for samples in packs]
        units = over_ranks([sum(self.objective.units(p.counts) for p in mine)], self.device)[0]
        return Minibatch(mine, int(most(len(mine), self.device)), units, pack([FILLER], [0], self.device))

    def logprobs(self, module: Any, minibatch: Minibatch) -> list[Tensor]:
        """Log-probs of the loss tokens of each of this rank's microbatches under a prepared module; no gradient."""
        found = []
        for p in minibatch.all:
            with torch.no_grad(), attention_of(module, p):
                found.append(inside(module, functools.partial(self.forward, p=p))[0])
        module.reshard()
        return found[: len(minibatch.packs)]

    def forward(self, model: Any, p: Pack) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the loss tokens. ([N], [N])"""
        out = model.base_model(input_ids=p.ids_T[None], position_ids=p.positions_T[None], use_cache=False)
        return token_logprobs(
            model,
            out.last_hidden_state[0],
            p,
            temperature=self.temperature,
            chunk=self.options.logit_chunk_tokens,
            entropy_gradient=self.options.entropy_weight != 0,
        )

    def learn(
        self, minibatch: Minibatch, reference: Sequence[Tensor] | None, old: Sequence[Tensor] | None, sync: Sync
    ) -> UpdateMetrics:
        """Gradients of one minibatch, left in the module; the metrics are this rank's.

        `reference`, `old`: log-probs of the frozen policy and of the learner before the update, by microbatch.
        """
        metrics = UpdateMetrics()
        for i, p in enumerate(minibatch.all):
            real = i < len(minibatch.packs)

            def work(model: Any, p: Pack = p, i: int = i, real: bool = real) -> tuple[Tensor, LossSums | None]:
                new_N, entropy_N = self.forward(model, p)
                if not real:
                    return new_N.sum() * 0.0, None
                sums = loss_sums(
                    new_N,
                    entropy_N,
                    advantages_N=p.advantages_N,
                    behaviour_N=p.behaviour_N,
                    counts=p.counts,
                    objective=self.objective,
                    reference_N=reference[i] if reference is not None else None,
                    old_N=old[i] if old is not None else None,
                )
                return sums.loss, sums  # FSDP2 hooks its backward to the tensors it can see in the answer

            with sync(i == minibatch.forwards - 1), attention_of(self.module, p):
                loss, sums = inside(self.module, work)
                # FSDP2 takes the mean over ranks, the loss is a mean over the units of all ranks
                (loss * (dist.get_world_size() / minibatch.units)).backward()
            if sums is not None:
                metrics.add_microbatch(sums, p)
        return metrics


def attention_of(module: Any, p: Pack) -> AbstractContextManager[Any]:
    """The pack's attention; open through backward, since gradient checkpointing attends again."""
    return path_attention(module, p.runs)


def together(ranks: Sequence[UpdateMetrics]) -> UpdateMetrics:
    """The metrics of all ranks of an update; norms and skipped updates are the same on each."""
    total = UpdateMetrics()
    total.norms, total.skipped = ranks[0].norms, ranks[0].skipped
    for part in ranks:
        for name, value in part.sums.items():
            total.sums[name] = total.sums.get(name, torch.zeros(())) + value
        for name in ("tokens", "units", "forward_tokens", "path_tokens", "microbatches"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
    found = [part.ratio_max for part in ranks if part.ratio_max is not None]
    total.ratio_max = torch.stack(found).max() if found else None
    return total
