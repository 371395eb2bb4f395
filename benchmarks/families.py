"""What works for which family of models, measured on tiny random ones: the table of docs/models.md.

    python benchmarks/families.py --output families.json

Each number is the largest difference to the model's own forward, with its own attention and without a cache: of FCI per
head and step, of the gradients of an update, of the log-probs of drawn tokens. Weights are drawn wide, so that
attention is peaked and states matter.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attnrl.attention.decoder import lone_from, remembers
from attnrl.attention.head import check_head
from attnrl.attention.paths import can_share
from attnrl.config import UpdateConfig
from attnrl.errors import ConfigError
from attnrl.local.learner import Learner
from attnrl.local.models import prepare_model
from attnrl.local.sampler import Sampler
from attnrl.policy.objective import loss_sums, objective
from attnrl.policy.packing import loss_positions, microbatches
from attnrl.scoring import fci, score
from attnrl.types import Request, Sample, Sampling, ScoreRequest, as_floats, as_ids

VOCABULARY = 61
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "attention_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
MAMBA_1 = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4}


def _turns(kind: str, attention: str = "full_attention") -> dict[str, Any]:
    return {"layer_types": [kind, attention] * 2}


REMEMBERING: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "lfm2": {**_turns("conv"), "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_turns("conv"), **EXPERTS, "num_dense_layers": 1},
    "lfm3": _turns("conv"),
    "granitemoehybrid": {
        **MAMBA, **_turns("mamba", "attention"), "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "logits_scaling": 2.0,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 1, "conv_kernel": 4, "chunk_size": 8, "expand": 2,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    "olmo_hybrid": {**_turns("linear_attention"), **DELTA},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "jamba": {
        **MAMBA_1, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 2, "num_experts_per_tok": 1,
    },
    "zamba": {
        **MAMBA_1, "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2, "n_mamba_heads": 2,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8,
        "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1, "adapter_rank": 4,
        "use_shared_attention_adapter": False,
    },
    "kimi_linear": {
        **LATENT, **LOCAL_EXPERTS, **_turns("linear_attention"), "linear_head_dim": 8, "linear_num_heads": 4,
    },
    "bailing_hybrid": {
        **LATENT, **LOCAL_EXPERTS, **_turns("linear_attention"), "n_group": 1, "topk_group": 1, "num_mtp_layers": 0,
    },
    "zaya": {},
    "minimax": {**_turns("linear_attention"), "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8},
    "recurrent_gemma": {"num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 8},
}  # fmt: skip
ATTENDING: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "qwen3_moe": EXPERTS, "smollm3": {}, "granite": {"logits_scaling": 2.0},
    "olmo2": {}, "phi3": {}, "glm4": {}, "mistral": {"sliding_window": 11},
    "cohere2": {"sliding_window": 11}, "olmo3": {"sliding_window": 11}, "gemma2": {"sliding_window": 11},
    "gemma3_text": {"sliding_window": 11}, "gpt_oss": {"sliding_window": 11, "num_local_experts": 4},
    "deepseek_v3": {
        **LATENT, "head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "n_group": 1, "topk_group": 1, "q_lora_rank": 8,
    },
    "hrm_text": {}, "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}, "mamba": {"state_size": 8},
}  # fmt: skip
FAMILIES = {**ATTENDING, **REMEMBERING}
SPREAD = {"zamba2": 0.1}  # of the weights; where it is wider, transformers' own forward with a cache differs by 3e-4


def tiny(family: str, **settings: Any) -> Any:
    """A random float32 model of the family, in eval mode."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**BASE, **FAMILIES[family], **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim >= 2:
                weights.normal_(0, SPREAD.get(family, 0.15))
    return prepare_model(model)


def own_attention(model: Any, ids: list[int]) -> np.ndarray:
    """The model's own attention, [layers, heads, T, T]: what `output_attentions` returns misses layers of some
    families, so its softmax is listened to.
    """
    softmax, seen = torch.nn.functional.softmax, []

    def heard(x: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
        out = softmax(x, *args, **given)
        if out.ndim == 4 and out.shape[-2] == len(ids) and out.shape[-1] in (len(ids), len(ids) + 1):  # 1: a sink
            seen.append(out[0, :, :, : len(ids)].double())
        return out

    torch.nn.functional.softmax = heard
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]), use_cache=False)
    finally:
        torch.nn.functional.softmax = softmax
    return torch.stack(seen).numpy()


def fci_gap(model: Any, delta: int = 2) -> float:
    """Of three sequences asked for at once, over layers, heads and steps."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, VOCABULARY, 30 + i).tolist() for i in range(3)]
    steps = [[(a, min(a + 3, len(row))) for a in range(2 + i, len(row), 3)] for i, row in enumerate(rows)]
    worst = 0.0
    for ids, spans, got_LHS in zip(rows, steps, fci(model, rows, steps, delta=delta, reduce="none"), strict=True):
        p_LHTT, want_LHS = own_attention(model, ids), np.zeros(got_LHS.shape)
        for k, (a, b) in enumerate(spans):
            for c, d in spans[k + delta :]:
                want_LHS[:, :, k] += p_LHTT[:, :, c:d, a:b].mean((2, 3))
        assert got_LHS.max() > 0
        worst = max(worst, float(np.abs(got_LHS - want_LHS).max()))
    return worst


def samples(count: int = 5) -> list[Sample]:
    """Of two prompts, with responses that begin alike, one with a mask."""
    rng = np.random.default_rng(0)
    heads, stem = [as_ids(rng.integers(3, VOCABULARY, n)) for n in (3, 11)], rng.integers(3, VOCABULARY, 4)
    found = []
    for i in range(count):
        response = np.concatenate([stem, rng.integers(3, VOCABULARY, 3 + 4 * i)])
        values = as_floats(rng.normal(size=len(response))), as_floats(rng.normal(size=len(response)) - 4)
        mask = rng.random(len(response)) < 0.6 if i == 1 else None
        found.append(Sample(heads[i % 2], as_ids(response), *values, str(i % 2), mask))
    return found


GIVEN = {"advantages_N": "advantages", "behaviour_N": "logprobs"}  # of `loss_sums`, by what samples call them


def own_gradients(model: Any, batch: list[Sample], options: UpdateConfig) -> dict[str, torch.Tensor]:
    """Of the mean loss over all loss tokens, by the model's own forward over one sample after the other."""
    model.zero_grad()
    made = objective(options)
    units = sum(len(loss_positions(s)) for s in batch)
    for s in batch:
        ids_T = torch.from_numpy(np.concatenate([s.prompt, s.response]).astype(np.int64))
        at_N = loss_positions(s)
        logits_NV = model(input_ids=ids_T[None], use_cache=False).logits[0, len(s.prompt) - 1 + at_N]
        logprobs_NV = torch.log_softmax(logits_NV, -1)
        new_N = logprobs_NV.gather(-1, torch.from_numpy(s.response[at_N].astype(np.int64))[:, None])[:, 0]
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1).detach()
        given = {name: torch.from_numpy(getattr(s, of)[at_N]) for name, of in GIVEN.items()}
        (loss_sums(new_N, entropy_N, **given, counts=[len(at_N)], objective=made).loss / units).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradient_gap(model: Any) -> float:
    """Of an update as the learner cuts it, with every layer kept and with every layer run again."""
    check_head(model)
    batch, worst = samples(), 0.0
    options = UpdateConfig(kl_weight=0.0, minibatches=1, gradient_checkpointing="none")
    want = own_gradients(model, batch, options)
    for layers in ("none", "all"):
        learner = Learner(model, options=options.model_copy(update={"gradient_checkpointing": layers}))
        cut = microbatches(batch, range(len(batch)), 64, share=learner.shares_prefixes, lone=lone_from(model))
        learner.accumulate(batch, cut)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == want.keys()
        worst = max(worst, *(float((found[name] - want[name]).abs().max()) for name in want))
    return worst


def draw_gap(model: Any) -> float:
    """Of tokens drawn by 2 and 7 rows at once, in slots and in pages, which must be the same: rows end at different
    times, begin while others run, and some have one context.
    """
    rng = np.random.default_rng(0)
    contexts = [as_ids(rng.integers(3, VOCABULARY, n)) for n in (1, 17, 9)]
    requests = [Request(contexts[i % 3], max_tokens=3 + 3 * i, seed=i) for i in range(7)]
    how = Sampling(temperature=0.8)
    ways: list[dict[str, Any]] = [{"rows": 2}, {"rows": 7}, {"rows": 5, "paged": True, "check_every": 3}]
    drawn = [Sampler(model, stop_ids=[2], **way).generate(requests, how, version=0) for way in ways]
    asked = [ScoreRequest(r.context, x.ids, ()) for r, x in zip(requests, drawn[0], strict=True)]
    scores = score(model, asked, temperature=0.8, fci=False)
    worst = 0.0
    for rollouts in drawn:
        for rollout, first, right in zip(rollouts, drawn[0], scores, strict=True):
            if not np.array_equal(rollout.ids, first.ids):
                raise AssertionError("other rows drew other tokens")
            worst = max(worst, float(np.abs(rollout.logprobs - right.logprobs).max()))
    return worst


def measured(how: Callable[[Any], float], model: Any) -> float | str:
    """The gap, or why there is none."""
    try:
        return how(model)
    except ConfigError as error:
        return str(error)


def measure(family: str) -> dict[str, Any]:
    """One row of the table."""
    model = tiny(family)
    gaps = {name: measured(how, tiny(family)) for name, how in GAPS.items()}
    return {
        "family": family,
        "layers": model.config.num_hidden_layers,
        "remembers": remembers(model),
        "packs": lone_from(model) is None,
        "shares": can_share(model),
        **gaps,
    }


GAPS = {"fci": fci_gap, "gradient": gradient_gap, "draw": draw_gap}


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown; "no" where the model was refused."""
    lines = ["| `model_type` | FCI | learner | own sampler | packs | shared prefixes |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = ["no" if isinstance(row[name], str) else f"{row[name]:.0e}" for name in GAPS]
        ways = zip(("packs", "shares"), cells, strict=False)  # scorer and learner pack, the learner shares
        cells += ["yes" if row[name] and user != "no" else "no" for name, user in ways]
        lines.append(f"| {row['family']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for family in args.families:
        rows.append(measure(family))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if args.output:
        args.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
