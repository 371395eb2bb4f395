"""Score and learn over one FSDP2 module, called on every rank in step.

FSDP2 gathers layers by collectives, so every rank must run as many forwards: ranks with fewer packs run fillers. An
error on one rank alone would leave the others waiting: inputs are checked in the driver, before the call.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from attnrl import scoring
from attnrl.attention.decoder import lone_from
from attnrl.attention.head import check_head
from attnrl.attention.paths import check_attention
from attnrl.attention.trie import bins_by_budget
from attnrl.policy.logprobs import pack_attention
from attnrl.policy.metrics import UpdateMetrics
from attnrl.policy.objective import LossSums
from attnrl.policy.packing import Pack, pack
from attnrl.policy.passes import Passes
from attnrl.policy.rates import Counters, learning_rate
from attnrl.scoring.scorer import ScoreReport
from attnrl.types import Sample, ScoreRequest, Scores, Scoring, Step, as_floats, as_ids

FILLER = Sample(as_ids([0]), as_ids([0]), as_floats([0.0]), as_floats([0.0]), "")
Sync = Callable[..., AbstractContextManager[None]]  # (is_last_micro_batch): then gradients are reduced over ranks


class Policy(Protocol):
    """One sharded module and its optimizer, as an engine keeps them; of a frozen policy the optimizer is not used."""

    module: Any
    optimizer: Any

    def eval_mode(self) -> AbstractContextManager[Any]:
        """While open, the weights are on the device and the module is evaluated."""

    def train_mode(self) -> AbstractContextManager[Any]:
        """The same for training."""

    def optimizer_zero_grad(self) -> None: ...

    def optimizer_step(self) -> float:
        """Clips the gradients and makes a step, none where their norm is not finite; the norm before."""


def decay_matrices_alone(optimizer: Any) -> None:
    """Where one group holds all parameters: matrices decay, vectors (norms, biases) do not, as in the local engine."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        every, group = groups[0]["params"], groups[0]
        vectors = {**group, "params": [p for p in every if p.dim() < 2], "weight_decay": 0.0}
        groups[:] = [{**group, "params": [p for p in every if p.dim() >= 2]}, vectors]


def prepare(module: Any, *, check: bool = True) -> None:
    """Once, on every rank and outside of any attention of ours: check attention and head, then take FSDP2's hooks from
    the head and let `inside` count as a forward. Of a head that is sharded apart from the root, as verl has it, each
    call would be a collective, and ranks run it over different numbers of chunks, in backward too."""
    if check:
        module.set_reshard_after_forward(False, recurse=False)  # the check calls root and head apart
        check_attention(module)
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
    """One rank of those that score and learn together. Microbatches without rows are fillers."""

    policy: Policy
    reference: Policy | None  # the frozen one, where there is a KL weight
    passes: Passes
    device: torch.device
    sync: Sync

    @property
    def shares(self) -> bool:
        """Whether prefixes that samples share are run over once."""
        return self.passes.shares(self.policy.module)

    def update(self, minibatches: Sequence[Sequence[Sequence[Sample]]], counters: Counters) -> UpdateMetrics:
        """One optimizer step for each minibatch, of which this rank holds microbatches: its metrics, on the host.

        Paper: Eq. 1.
        """
        laid_out = [self.lay_out(packs) for packs in minibatches]
        nothing = [None] * len(laid_out)
        known = self._known(self.reference, laid_out) if self.reference is not None else nothing
        old = self._known(self.policy, laid_out) if self.passes.objective.needs_old else nothing
        metrics = UpdateMetrics()
        with self.policy.train_mode():
            for one in zip(laid_out, known, old, strict=True):
                self.policy.optimizer_zero_grad()
                self._step(self.learn(*one), counters, metrics)
        metrics.sums = {name: value.cpu() for name, value in metrics.sums.items()}
        metrics.ratio_max = None if metrics.ratio_max is None else metrics.ratio_max.cpu()
        return metrics

    def lay_out(self, packs: Sequence[Sequence[Sample]]) -> list[Pack]:
        """This rank's microbatches of one minibatch on the device, filled up to as many as others; a collective."""
        share = self.shares
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
        self, packs: Sequence[Pack], reference: Sequence[Tensor] | None = None, old: Sequence[Tensor] | None = None
    ) -> UpdateMetrics:
        """Gradients of one minibatch, left in the policy's module; the metrics are this rank's.

        `reference`, `old`: log-probs of the frozen policy and of the learner before the update, by microbatch.
        """
        module = self.policy.module
        units = over_ranks([sum(self.passes.objective.units(p.counts) for p in packs if p.rows)], self.device)[0]
        metrics = UpdateMetrics()
        for i, p in enumerate(packs):
            known = {"reference_N": reference and reference[i], "old_N": old and old[i]}

            def work(model: Any, p: Pack = p, known: Any = known) -> tuple[Tensor, LossSums]:
                sums = self.passes.loss(model, p, **known)
                return sums.loss, sums  # FSDP2 hooks its backward to the tensors it can see in the answer

            # FSDP2 takes the mean over ranks, the loss is a mean over the units of all ranks
            weight = dist.get_world_size() / units if p.rows else 0.0
            with self.sync(is_last_micro_batch=i == len(packs) - 1), pack_attention(module, p):
                loss, sums = module.attnrl_inside(work)
                (loss * weight).backward()
            if p.rows:
                metrics.add_microbatch(sums, p)
        return metrics

    def _known(self, policy: Policy, laid_out: Sequence[Sequence[Pack]]) -> list[list[Tensor]]:
        """Log-probs of every microbatch of this rank."""
        with policy.eval_mode():
            return [self.logprobs(policy.module, packs) for packs in laid_out]

    def _step(self, here: UpdateMetrics, counters: Counters, metrics: UpdateMetrics) -> None:
        """One optimizer step, or none where loss or gradient is not finite; all ranks decide the same."""
        for group in self.policy.optimizer.param_groups:
            group["lr"] = learning_rate(self.passes.options, counters.updates)
        finite = math.isfinite(over_ranks([here.total("loss")], self.device)[0])
        norm = self.policy.optimizer_step() if finite else math.nan
        metrics.add_step(here, norm, counters, self.passes.options.max_bad_updates)


def make_rank(policy: Policy, reference: Policy | None, passes: Passes, device: torch.device, sync: Sync) -> Rank:
    """This rank over a policy as an engine built it: checked, prepared, and with the local engine's weight decay."""
    with policy.eval_mode():
        prepare(policy.module)
    if reference is not None:  # the same model; its weights may lie in host memory
        prepare(reference.module, check=False)
    if policy.optimizer is not None:
        decay_matrices_alone(policy.optimizer)
    return Rank(policy, reference, passes, device, sync)
