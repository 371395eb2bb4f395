"""What ranks do with torch alone, on gloo: torchrun two_ranks.py WORK MODEL FOLDER

Layers, embedding and head are sharded apart, as verl does it. Every rank writes FOLDER/WORK-WORLD-RANK.json: lines of
two processes on one pipe can mix.

equal    score and learn at two ranks against one model in one process; the ranks get different numbers of packs and of
         chunks of the head
train    two updates, a checkpoint, and a third update
resume   the checkpoint, and the third update
fresh    a checkpoint before any update, and the checkpoint again
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import attnrl.scoring.entropy as head
from attnrl import scoring
from attnrl.config import UpdateConfig
from attnrl.local.learner import Learner
from attnrl.policy.objective import objective
from attnrl.policy.passes import Passes
from attnrl.ranks import sharded, weights
from attnrl.ranks.share import share_packs
from attnrl.types import Sample, ScoreRequest, Scoring, Step, as_floats, as_ids

OPTIONS = UpdateConfig(kl_weight=0.0, logit_chunk_tokens=16, gradient_checkpointing="none", share_prefixes=False)
CPU = torch.device("cpu")
RNG = np.random.default_rng(0)
ROWS = [(as_ids(RNG.integers(4, 99, 5)), as_ids(RNG.integers(4, 99, n))) for n in (30, 7, 55, 20, 41, 13, 9)]
SAMPLES = [
    Sample(p, r, as_floats(RNG.normal(size=len(r))), as_floats(np.full(len(r), -5.5)), str(i))
    for i, (p, r) in enumerate(ROWS)
]


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
    rank = sharded.Rank(Passes(OPTIONS, objective(OPTIONS)), CPU)
    module.train()
    for _ in range(2):  # a second time: what the first left behind must not matter
        module.zero_grad()
        minibatch = rank.lay_out([[SAMPLES[i]] for i in mine], share=False)
        rank.logprobs(module, minibatch)
        metrics = rank.learn(module, minibatch, sync=lambda last: nullcontext())
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
    """One sharded policy and its optimizer, matrices and vectors in groups of their own."""

    def __init__(self, model: str) -> None:
        self.module, self.rank = shard(model), sharded.Rank(Passes(OPTIONS, objective(OPTIONS)), CPU)
        sharded.prepare(self.module)
        every = list(self.module.parameters())
        groups = [{"params": [p for p in every if p.dim() >= 2]}, {"params": [p for p in every if p.dim() < 2]}]
        groups[1]["weight_decay"] = 0.0
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)

    def update(self) -> dict:
        packs = share_packs(SAMPLES, range(len(SAMPLES)), dist.get_world_size(), 64, share=False)[dist.get_rank()]
        self.module.train()
        self.optimizer.zero_grad()
        laid_out = self.rank.lay_out(packs, share=False)
        metrics = self.rank.learn(self.module, laid_out, sync=lambda last: nullcontext())
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters()]).full_tensor().item()
        self.optimizer.step()
        loss, units = sharded.over_ranks([metrics.total("loss"), metrics.units], CPU)
        return {"loss": loss / units, "norm": norm, "checksum": weights.checksum(self.module, "bfloat16", CPU)}


def train(model: str, folder: Path) -> dict:
    policy = Trained(model)
    first = [policy.update() for _ in range(2)]
    weights.save_shards(folder / "actor", policy.module, policy.optimizer)
    for dtype in ("float32", "bfloat16"):
        weights.save_model(folder / dtype, policy.module, dtype)
    return {"first": first, "third": policy.update()}


def resume(model: str, folder: Path) -> dict:
    policy = Trained(model)
    weights.load_shards(folder / "actor", policy.module, policy.optimizer)
    return {"third": policy.update()}


def fresh(model: str, folder: Path) -> dict:
    policy, other = Trained(model), Trained(model)
    weights.save_shards(folder / "actor", policy.module, policy.optimizer)
    other.update()
    weights.load_shards(folder / "actor", other.module, other.optimizer)
    return {"updates": [policy.update(), other.update(), Trained(model).update()]}


def main() -> None:
    work, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    works = {"equal": lambda: equal(model)}
    works |= {w.__name__: lambda w=w: w(model, folder) for w in (train, resume, fresh)}
    name = f"{work}-{dist.get_world_size()}-{dist.get_rank()}.json"
    Path(folder, name).write_text(json.dumps(works[work]()))
    dist.barrier()  # nobody leaves while another is still at work
    os._exit(0)  # on the interpreter's way out, a thread of gloo's may still abort the process


if __name__ == "__main__":
    main()
