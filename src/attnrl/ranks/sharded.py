"""Score and learn over one FSDP2 module, called on every rank in step.

FSDP2 gathers layers by collectives, so every rank must run as many forwards: ranks with fewer packs run fillers. An
error on one rank alone would leave the others waiting: inputs are checked in the driver, before the call.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from attnrl import scoring
from attnrl.attention.decoder import check_head, lone_from
from attnrl.attention.trie import bins_by_budget
from attnrl.policy.logprobs import pack_attention
from attnrl.policy.metrics import UpdateMetrics
from attnrl.policy.objective import LossSums
from attnrl.policy.packing import Pack, pack
from attnrl.policy.passes import Passes
from attnrl.scoring.scorer import ScoreReport
from attnrl.types import Sample, ScoreRequest, Scores, Scoring, Step, as_floats, as_ids

FILLER = Sample(as_ids([0]), as_ids([0]), as_floats([0.0]), as_floats([0.0]), "")
Sync = Callable[[bool], AbstractContextManager[None]]  # whether gradients are reduced over ranks after this one


def prepare(module: Any, *, check: bool = True) -> None:
    """Once, on every rank and outside of any attention of ours: check the head, then take FSDP2's hooks from it and let
    `inside` count as a forward. Of a head that is sharded apart from the root, as verl has it, each call would be a
    collective, and ranks run it over different numbers of chunks, in backward too."""
    if check:
        module.set_reshard_after_forward(False, recurse=False)  # the check calls root and head apart
        check_head(module)
        module.reshard()
    head = module.get_output_embeddings()
    if isinstance(head, FSDPModule):
        head._forward_pre_hooks.clear()
        head._forward_hooks.clear()
    module.attnrl_inside = types.MethodType(inside, module)
    register_fsdp_forward_method(module, "attnrl_inside")


def inside(module: Any, work: Callable[[Any], Any]) -> Any:
    """work(module), as a method of the prepared module that counts as its forward: FSDP2 gathers the root's parameters
    around it, and this the head's, which stay until the end of backward."""
    head = module.get_output_embeddings()
    apart = isinstance(head, FSDPModule)
    if apart:
        head.unshard()
    answer = work(module)
    if apart and not torch.is_grad_enabled():
        head.reshard()
    return answer


def over_ranks(values: Sequence[float], device: torch.device, op: Any = None) -> list[float]:
    """The values added up over ranks, or reduced by `op`."""
    tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op or dist.ReduceOp.SUM)
    return [float(value) for value in tensor]


def idle(own: int, device: torch.device) -> int:
    """How many forwards more the busiest rank runs than this one with its own."""
    return int(over_ranks([own], device, dist.ReduceOp.MAX)[0]) - own


def score(
    module: Any, requests: Sequence[ScoreRequest], scoring_: Scoring, *, token_budget: int, device: torch.device
) -> tuple[list[Scores], ScoreReport]:
    """Scores of this rank's requests under a prepared module, by attnrl.scoring as it is, and what they cost."""
    options = asdict(scoring_)
    lengths = [len(r.prompt) + len(r.response) for r in requests]
    fillers = idle(len(bins_by_budget(lengths, token_budget, lone_from(module))), device)
    filler = ScoreRequest(as_ids([0]), as_ids([0]), (Step(0, 1),))
    report = ScoreReport()

    def work(model: Any) -> list[Scores]:
        found = scoring.score(model, requests, token_budget=token_budget, report=report, **options)
        for _ in range(fillers):
            scoring.score(model, [filler], **options)
        return found

    with torch.no_grad():
        found = module.attnrl_inside(work)
    module.reshard()
    return found, report


@dataclass(frozen=True, slots=True, eq=False)
class Rank:
    """One rank of those that learn together. Microbatches without rows are fillers."""

    passes: Passes
    device: torch.device

    def lay_out(self, packs: Sequence[Sequence[Sample]], *, share: bool) -> list[Pack]:
        """This rank's microbatches of one minibatch on the device, filled up to as many as others; a collective."""
        mine = [pack(samples, range(len(samples)), self.device, share_prefixes=share) for samples in packs]
        filler = replace(pack([FILLER], [0], self.device), rows=())
        return mine + [filler] * idle(len(mine), self.device)

    def logprobs(self, module: Any, packs: Sequence[Pack]) -> list[Tensor]:
        """Log-probs of the loss tokens of each microbatch under a prepared module; no gradient."""
        with torch.no_grad():
            found = [module.attnrl_inside(partial(self.passes.logprobs, pack=p)) for p in packs]
        module.reshard()
        return found

    def learn(
        self,
        module: Any,
        packs: Sequence[Pack],
        reference: Sequence[Tensor] | None = None,
        old: Sequence[Tensor] | None = None,
        *,
        sync: Sync,
    ) -> UpdateMetrics:
        """Gradients of one minibatch, left in the module; the metrics are this rank's.

        `reference`, `old`: log-probs of the frozen policy and of the learner before the update, by microbatch.
        """
        units = over_ranks([sum(self.passes.objective.units(p.counts) for p in packs if p.rows)], self.device)[0]
        metrics = UpdateMetrics()
        for i, p in enumerate(packs):
            known = {"reference_N": reference and reference[i], "old_N": old and old[i]}

            def work(model: Any, p: Pack = p, known: Any = known) -> tuple[Tensor, LossSums]:
                sums = self.passes.loss(model, p, **known)
                return sums.loss, sums  # FSDP2 hooks its backward to the tensors it can see in the answer

            # FSDP2 takes the mean over ranks, the loss is a mean over the units of all ranks
            weight = dist.get_world_size() / units if p.rows else 0.0
            with sync(i == len(packs) - 1), pack_attention(module, p):
                loss, sums = module.attnrl_inside(work)
                (loss * weight).backward()
            if p.rows:
                metrics.add_microbatch(sums, p)
        return metrics
