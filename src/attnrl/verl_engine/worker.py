"""verl's actor worker with our verbs over the FSDP2 module of its engine: one process per GPU."""

from __future__ import annotations

import faulthandler
import json
import math
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker

from attnrl.attention.decoder import check_model
from attnrl.attention.paths import can_share
from attnrl.config import UpdateConfig
from attnrl.errors import ConfigError
from attnrl.local.learner import UpdateMetrics
from attnrl.policy.objective import objective
from attnrl.policy.rates import learning_rate
from attnrl.scoring.scorer import ScoreReport
from attnrl.types import Sample, ScoreRequest, Scores, Scoring
from attnrl.verl_engine import sharded

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Method = TypeVar("Method", bound=Callable[..., Any])


def on_every_rank(method: Method) -> Method:
    """From the driver, every argument is a list with an entry per rank; the answer is a list of Ray's references."""
    registered: Method = register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)(method)
    return registered


class Worker(ActorRolloutRefWorker):  # type: ignore[misc]
    """Every method runs on all ranks at once; `limit_s` is when a rank that is still in it prints where it stands."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if get_device_name() == "cpu" else torch.device(get_device_name(), get_device_id())

    @on_every_rank
    def attnrl_start(self, limit_s: float) -> dict[str, Any]:
        """Build the model as verl does; what the driver needs to know of it."""
        with traced(limit_s):
            self.init_model()
            engine = self.actor.engine
            check_model(engine.module)
            with engine.eval_mode():
                sharded.prepare(engine.module)
            if self.ref is not None:  # the same model; its weights may lie in host memory
                sharded.prepare(self.ref.engine.module, check=False)
            groups = engine.optimizer.param_groups if engine.optimizer is not None else []
            if len(groups) == 1:  # as in the local engine: matrices decay, vectors (norms, biases) do not
                every, group = groups[0]["params"], groups[0]
                vectors = {**group, "params": [p for p in every if p.dim() < 2], "weight_decay": 0.0}
                groups[:] = [{**group, "params": [p for p in every if p.dim() >= 2]}, vectors]
            return {
                "host": socket.gethostname(),
                "vocabulary": engine.module.get_input_embeddings().weight.shape[0],
                "can_share": can_share(engine.module),
            }

    @on_every_rank
    def attnrl_score(
        self, requests: Sequence[ScoreRequest], scoring: Scoring, token_budget: int, limit_s: float
    ) -> tuple[list[Scores], ScoreReport]:
        engine = self.actor.engine
        with traced(limit_s), engine.eval_mode():
            return sharded.score(engine.module, requests, scoring, token_budget=token_budget, device=self.device)

    @on_every_rank
    def attnrl_update(
        self,
        minibatches: Sequence[Sequence[Sequence[Sample]]],
        options: UpdateConfig,
        temperature: float,
        counters: dict[str, int],
        limit_s: float,
    ) -> tuple[UpdateMetrics, dict[str, int]]:
        """One optimizer step for each minibatch, of which this rank holds microbatches: this rank's metrics, and the
        counters after it.

        Paper: Eq. 1.
        """
        engine = self.actor.engine
        with traced(limit_s):
            rank = sharded.Rank(engine.module, self.device, options, objective(options), temperature)
            share = options.share_prefixes and can_share(engine.module)
            laid_out = [rank.lay_out(packs, share=share) for packs in minibatches]
            reference = old = None
            if options.kl_weight > 0:
                reference = logprobs(self.ref.engine, rank, laid_out)
            if rank.objective.needs_old:
                old = logprobs(engine, rank, laid_out)
            metrics, counters = UpdateMetrics(), dict(counters)
            with engine.train_mode():
                for i, minibatch in enumerate(laid_out):
                    self._minibatch(rank, minibatch, reference and reference[i], old and old[i], counters, metrics)
                    if counters["skipped_in_a_row"] >= options.max_bad_updates:
                        break
        metrics.sums = {name: value.cpu() for name, value in metrics.sums.items()}
        metrics.ratio_max = None if metrics.ratio_max is None else metrics.ratio_max.cpu()
        return metrics, counters

    def _minibatch(
        self,
        rank: sharded.Rank,
        minibatch: sharded.Minibatch,
        reference: list[Tensor] | None,
        old: list[Tensor] | None,
        counters: dict[str, int],
        metrics: UpdateMetrics,
    ) -> None:
        """One optimizer step, or none where loss or gradient is not finite; all ranks decide the same."""
        engine = self.actor.engine
        engine.optimizer_zero_grad()
        sync = lambda last: engine._gradient_sync_context(is_last_micro_batch=last)  # noqa: E731
        here = rank.learn(minibatch, reference, old, sync)
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate(rank.options, counters["updates"])
        finite = math.isfinite(sharded.over_ranks([here.total("loss")], self.device)[0])
        norm = engine.optimizer_step() if finite else math.nan  # clips; makes no step where the norm is not finite
        if math.isfinite(norm):
            metrics.add(here, norm)
            counters |= {"updates": counters["updates"] + 1, "skipped_in_a_row": 0}
        else:
            metrics.skipped += 1
            counters |= {name: counters[name] + 1 for name in ("skipped", "skipped_in_a_row")}

    @on_every_rank
    def attnrl_checksum(self, dtype: str, limit_s: float) -> tuple[float, float]:
        """A sum over all weights as the optimizer has them, and as servers of this dtype get them."""
        with traced(limit_s):
            sums = [0.0, 0.0]
            for p in self.actor.engine.module.parameters():
                local = (p.to_local() if isinstance(p, DTensor) else p).detach()
                for i, value in enumerate((local, local.to(DTYPES[dtype]))):
                    flat = value.double().flatten()
                    sums[i] += float(flat.abs().sum() + (flat * flat).sum())
            exact, seen = sharded.over_ranks(sums, self.device)
            return exact, seen

    @on_every_rank
    def attnrl_save(self, path: str, version: int, dtype: str, limit_s: float) -> None:
        """verl's shards to `actor/`, a Hugging Face model of this dtype to `model/`."""
        with traced(limit_s):
            self._check_visible(Path(path))
            self.save_checkpoint(str(Path(path, "actor")), global_step=version)
            if self.rank == 0:
                Path(path, "actor", "huggingface").rename(Path(path, "model"))
                cast_model(Path(path, "model"), dtype)
            dist.barrier()

    @on_every_rank
    def attnrl_load(self, path: str, limit_s: float) -> None:
        with traced(limit_s):
            self._check_visible(Path(path))
            self.load_checkpoint(str(Path(path, "actor")), del_local_after_load=False)

    def _check_visible(self, path: Path) -> None:
        """The same error on every rank where some rank does not see the driver's directory."""
        blind = sharded.most(0.0 if path.is_dir() else self.rank + 1.0, self.device)
        if blind:
            raise ConfigError(f"rank {int(blind) - 1} does not see {path}: --run-dir must lie on a shared file system")

    @on_every_rank
    def attnrl_memory(self, limit_s: float) -> float:
        """Most device memory held since last asked, GB; 0 without a GPU."""
        if self.device.type != "cuda":
            return 0.0
        held: float = torch.cuda.max_memory_allocated(self.device) / 1e9
        torch.cuda.reset_peak_memory_stats(self.device)
        return held


@contextmanager
def traced(limit_s: float) -> Iterator[None]:
    """While open for longer than the limit, this process prints the stack of every thread, once."""
    faulthandler.dump_traceback_later(limit_s, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def logprobs(engine: Any, rank: sharded.Rank, laid_out: list[sharded.Minibatch]) -> list[list[Tensor]]:
    """Log-probs of every microbatch of this rank under one of verl's engines."""
    with engine.eval_mode():
        return [rank.logprobs(engine.module, minibatch) for minibatch in laid_out]


def cast_model(folder: Path, dtype: str) -> None:
    """The tensors of a saved model in this dtype, and its config.json saying so. verl writes float32 under any name."""
    from safetensors.torch import load_file, save_file

    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        cast = {name: t.to(DTYPES[dtype]) if t.is_floating_point() else t for name, t in tensors.items()}
        if any(cast[name] is not t for name, t in tensors.items()):
            save_file(cast, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")
