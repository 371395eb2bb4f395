"""Score and learn on two gloo ranks with torch alone, against one model in one process: torchrun two_ranks.py MODEL OUT

Layers, embedding and head are sharded apart, as verl does it; the ranks get different numbers of packs and of chunks of
the head. Writes OUT/RANK.json (lines of two processes on one pipe can mix).
"""

import json
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
from attnrl.types import Sample, ScoreRequest, Scoring, Step, as_floats, as_ids
from attnrl.verl_engine import sharded

OPTIONS = UpdateConfig(kl_weight=0.0, logit_chunk_tokens=16, gradient_checkpointing=False, share_prefixes=False)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rng = np.random.default_rng(0)
    rows = [(as_ids(rng.integers(4, 99, 5)), as_ids(rng.integers(4, 99, n))) for n in (30, 7, 55, 20, 41, 13, 9)]
    asked = [ScoreRequest(p, r, tuple(Step(i, min(i + 4, len(r))) for i in range(0, len(r), 4))) for p, r in rows]
    samples = [
        Sample(p, r, as_floats(rng.normal(size=len(r))), as_floats(np.full(len(r), -5.5)), str(i))
        for i, (p, r) in enumerate(rows)
    ]
    plain, module = (AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32) for _ in range(2))
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for part in (*module.model.layers, module.model.embed_tokens, module.lm_head, module):
        fully_shard(part, reshard_after_forward=True)
    wanted = scoring.score(plain, asked, delta=1)
    head.CHUNK_BYTES["cpu"] = 16 * 256 * 4  # 16 positions at a time
    mine, cpu = ([0, 1, 2, 3, 4], [5, 6])[dist.get_rank()], torch.device("cpu")
    found, _ = sharded.score(module, [asked[i] for i in mine], Scoring(delta=1), token_budget=64, device=cpu)
    gaps = [np.abs(a.logprobs - wanted[i].logprobs).max() for i, a in zip(mine, found, strict=True)]
    gaps += [np.abs(a.fci - wanted[i].fci).max() for i, a in zip(mine, found, strict=True)]

    rank = sharded.Rank(module.train(), cpu, OPTIONS, objective(OPTIONS), 1.0)
    for _ in range(2):  # a second time: what the first left behind must not matter
        module.zero_grad()
        minibatch = rank.lay_out([[samples[i]] for i in mine], share=False)
        rank.logprobs(module, minibatch)
        metrics = rank.learn(minibatch, None, None, lambda last: nullcontext())
    loss, units = sharded.over_ranks([metrics.total("loss"), metrics.units], cpu)
    local = Learner(plain, options=OPTIONS).accumulate(samples, [list(range(len(samples)))])
    pairs = list(zip(module.parameters(), plain.parameters(), strict=True))
    wrong = max((p.grad.full_tensor() - q.grad).abs().max().item() for p, q in pairs)
    figures = {
        "score_gap": float(max(gaps)),
        "loss": [loss / units, local.total("loss") / local.units],
        "gradient_gap": wrong,
        "gradient": max(q.grad.abs().max().item() for _, q in pairs),
    }
    Path(sys.argv[2], f"{dist.get_rank()}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
