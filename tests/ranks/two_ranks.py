"""What ranks do with torch alone, on gloo: torchrun two_ranks.py WORK MODEL FOLDER

Layers, embedding and head are sharded apart, as verl does it. Every rank writes FOLDER/WORK-WORLD-RANK.json: lines of
two processes on one pipe can mix.

equal    score and learn at two ranks against one model in one process; the ranks get different numbers of packs and of
         chunks of the head
update   one update, KL, importance weights and all, at two ranks against the local learner
bad      updates of which one rank alone has a loss that is no number
train    two updates, a checkpoint, and a third update
resume   the checkpoint, and the third update
fresh    a checkpoint before any update, and the checkpoint again
"""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import attnrl.scoring.entropy as head
from attnrl import scoring
from attnrl.config import UpdateConfig
from attnrl.errors import TrainingError
from attnrl.local.learner import Learner
from attnrl.policy.metrics import UpdateMetrics
from attnrl.policy.objective import objective
from attnrl.policy.passes import Passes, minibatches
from attnrl.policy.rates import Counters
from attnrl.ranks import sharded, verbs, weights
from attnrl.ranks.share import share_packs
from attnrl.types import Sample, ScoreRequest, Scoring, Step, as_floats, as_ids

KEYS = {"logit_chunk_tokens": 16, "gradient_checkpointing": "none", "share_prefixes": False}
KEYS |= {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1e9}
OPTIONS = UpdateConfig(**KEYS, kl_weight=0.0)
CPU = torch.device("cpu")
RNG = np.random.default_rng(0)
ROWS = [(as_ids(RNG.integers(4, 99, 5)), as_ids(RNG.integers(4, 99, n))) for n in (30, 7, 55, 20, 41, 13, 9)]
SAMPLES = [
    Sample(p, r, as_floats(RNG.normal(size=len(r))), as_floats(np.full(len(r), -5.5)), str(i))
    for i, (p, r) in enumerate(ROWS)
]

ALL = range(len(SAMPLES))


def sync(*, is_last_micro_batch: bool) -> nullcontext:
    return nullcontext()


def shard(model: str):
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tied = module.config.tie_word_embeddings
    for part in (*module.model.layers, *([] if tied else [module.model.embed_tokens, module.lm_head]), module):
        fully_shard(part, reshard_after_forward=True)
    return module


def equal(model: str) -> dict:
    asked = [ScoreRequest(p, r, tuple(Step(i, min(i + 4, len(r))) for i in range(0, len(r), 4))) for p, r in ROWS]
    plain, module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), shard(model)
    wanted = scoring.score(plain, asked, delta=1)
    head.CHUNK_BYTES["cpu"] = 16 * 256 * 4  # 16 positions at a time
    mine = ([0, 1, 2, 3, 4], [5, 6])[dist.get_rank()]
    sharded.prepare(module)
    found, _ = sharded.score(module, [asked[i] for i in mine], Scoring(delta=1), token_budget=64, device=CPU)
    gaps = [np.abs(a.logprobs - wanted[i].logprobs).max() for i, a in zip(mine, found, strict=True)]
    gaps += [np.abs(a.fci - wanted[i].fci).max() for i, a in zip(mine, found, strict=True)]
    rank = sharded.Rank(SimpleNamespace(module=module), None, Passes(OPTIONS, objective(OPTIONS)), CPU, sync)
    module.train()
    for _ in range(2):  # a second time: what the first left behind must not matter
        module.zero_grad()
        minibatch = rank.lay_out([[SAMPLES[i]] for i in mine])
        rank.logprobs(module, minibatch)
        metrics = rank.learn(minibatch)
    loss, units = sharded.over_ranks([metrics.total("loss"), metrics.units], CPU)
    local = Learner(plain, options=OPTIONS).accumulate(SAMPLES, [list(range(len(SAMPLES)))])
    pairs = list(zip(module.parameters(), plain.parameters(), strict=True))
    return {
        "score_gap": float(max(gaps)),
        "loss": [loss / units, local.total("loss") / local.units],
        "gradient_gap": max((p.grad.full_tensor() - q.grad).abs().max().item() for p, q in pairs),
        "gradient": max(q.grad.abs().max().item() for _, q in pairs),
    }


class Trained:
    """One sharded policy and its optimizer, as ranks are given them; also the worker that is asked."""

    def __init__(self, model: str, options: UpdateConfig = OPTIONS, reference: Trained | None = None) -> None:
        self.module = shard(model)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1.0, weight_decay=0.1)
        self.ours = sharded.make_rank(self, reference, Passes(options, objective(options)), CPU, sync)
        self.counters = Counters()

    def eval_mode(self) -> nullcontext:
        return nullcontext(self.module.eval())

    def train_mode(self) -> nullcontext:
        return nullcontext(self.module.train())

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters()]).full_tensor().item()
        if math.isfinite(norm):
            self.optimizer.step()
        return norm

    def checksum(self) -> tuple[float, float]:
        return verbs.checksum(self, "bfloat16")

    def update(self, samples=SAMPLES, plan=(ALL,)) -> UpdateMetrics:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        dealt = [share_packs(samples, rows, ranks, 64, share=False)[rank] for rows in plan]
        return verbs.update(self, dealt, self.counters)[0]

    def told(self) -> dict:
        """One update: loss over all ranks, gradient norm, weights after it."""
        metrics = self.update()
        loss, units = sharded.over_ranks([metrics.total("loss"), metrics.units], CPU)
        return {"loss": loss / units, "norm": metrics.norms[0], "checksum": self.checksum()}


def moved(module):
    """The module with other weights: a reference that has a KL to the policy from the start."""
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.5)
    return module


def update(model: str) -> dict:
    options = UpdateConfig(**KEYS, kl_weight=0.05, importance_cap=2.0, minibatches=3)
    reference = Trained(model, options)
    moved(reference.module)
    policy = Trained(model, options, reference)
    metrics = policy.update(SAMPLES, minibatches(SAMPLES, options, seed=0, version=0))
    names = ("kl", "surrogate", "entropy", "behaviour_kl", "importance_weight")
    loss, units, tokens, *totals = sharded.over_ranks(
        [metrics.total("loss"), metrics.units, metrics.tokens, *map(metrics.total, names)], CPU
    )
    found = {f"policy/{name}": total / tokens for name, total in zip(names, totals, strict=True)}
    found |= {"policy/loss": loss / units, "policy/grad_norm": float(np.mean(metrics.norms))}
    plain, frozen = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    local = Learner(plain, moved(frozen), options=options).update(SAMPLES, version=0)
    return {
        "ranks": found,
        "local": {name: local[name] for name in found},
        "norms": metrics.norms,
        "counters": asdict(policy.counters),
    }


def bad(model: str) -> dict:
    policy = Trained(model, UpdateConfig(**KEYS, kl_weight=0.0, max_bad_updates=2))
    wrong = replace(SAMPLES[0], advantages=as_floats(np.full(len(SAMPLES[0].response), np.nan)))
    hurt = [wrong, *SAMPLES[1:]]
    rows = []
    for samples in (SAMPLES, hurt, SAMPLES, hurt):
        metrics = policy.update(samples)
        counted = [len(metrics.norms), metrics.skipped, *asdict(policy.counters).values()]
        rows.append({"counted": counted, "checksum": policy.checksum()})
    try:
        policy.update(hurt)
    except TrainingError as error:
        return {"rows": rows, "error": str(error)}
    return {}


def train(model: str, folder: Path) -> dict:
    policy = Trained(model)
    first = [policy.told() for _ in range(2)]
    weights.save_shards(folder / "actor", policy.module, policy.optimizer)
    for dtype in ("float32", "bfloat16"):
        weights.save_model(folder / dtype, policy.module, dtype)
    return {"first": first, "third": policy.told()}


def resume(model: str, folder: Path) -> dict:
    policy = Trained(model)
    weights.load_shards(folder / "actor", policy.module, policy.optimizer)
    return {"third": policy.told()}


def fresh(model: str, folder: Path) -> dict:
    policy, other = Trained(model), Trained(model)
    weights.save_shards(folder / "actor", policy.module, policy.optimizer)
    other.told()
    weights.load_shards(folder / "actor", other.module, other.optimizer)
    return {"updates": [policy.told(), other.told(), Trained(model).told()]}


def main() -> None:
    work, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    works = {w.__name__: lambda w=w: w(model) for w in (equal, update, bad)}
    works |= {w.__name__: lambda w=w: w(model, folder) for w in (train, resume, fresh)}
    name = f"{work}-{dist.get_world_size()}-{dist.get_rank()}.json"
    Path(folder, name).write_text(json.dumps(works[work]()))
    dist.barrier()  # nobody leaves while another is still at work
    os._exit(0)  # on the interpreter's way out, a thread of gloo's may still abort the process


if __name__ == "__main__":
    main()
