"""Layers that run again in `backward`: the same gradients whichever they are, and as many as memory asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    OPTConfig,
    Qwen2Config,
)

from attnrl.cli.flags import read_value
from attnrl.config import ModelConfig, UpdateConfig, load_config
from attnrl.config.base import Layers
from attnrl.errors import ConfigError
from attnrl.local import recompute
from attnrl.local.learner import Learner
from attnrl.local.models import add_lora, prepare_model
from attnrl.local.recompute import Kept, fewest_layers, layers_of
from attnrl.policy.logprobs import pack_attention
from attnrl.types import Sample, as_floats, as_ids

LAYERS = 3
SIZE: dict[str, Any] = {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
CONFIGS: dict[str, Any] = {
    "qwen2": Qwen2Config(**SIZE, intermediate_size=48, num_key_value_heads=2),
    "gpt2": GPT2Config(vocab_size=37, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64),
    "gemma2": Gemma2Config(  # windows and soft-caps: its attention runs again by itself too
        **SIZE, intermediate_size=48, num_key_value_heads=2, head_dim=8, sliding_window=6, query_pre_attn_scalar=8
    ),
    "gpt_oss": GptOssConfig(
        **SIZE,
        intermediate_size=24,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "gpt_neox": GPTNeoXConfig(**SIZE, intermediate_size=48),
    "opt": OPTConfig(**SIZE, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64),
}


def tiny(kind: str = "qwen2", *, lora: bool = False) -> Any:
    torch.manual_seed(0)
    model = prepare_model(AutoModelForCausalLM.from_config(CONFIGS[kind], attn_implementation="eager"))
    return add_lora(model, ModelConfig(lora_rank=2, lora_targets=("q_proj", "down_proj")), seed=0) if lora else model


def batch() -> list[Sample]:
    """Two prompts with three responses each; the second and third begin as the first does."""
    rng = np.random.default_rng(0)
    found = []
    for uid in "ab":
        prompt, trunk = as_ids(rng.integers(0, 37, 5)), rng.integers(0, 37, 12)
        for cut in (12, 4, 7):
            ids = as_ids(np.concatenate([trunk[:cut], rng.integers(0, 37, 12 - cut)]))
            found.append(Sample(prompt, ids, as_floats(rng.normal(size=12)), as_floats(np.full(12, -3.5)), uid))
    return found


def learner(model: Any, **keys: Any) -> Learner:
    return Learner(model, options=UpdateConfig(**{"kl_weight": 0.0, "minibatches": 1, **keys}))


@pytest.fixture(params=["kept", "again"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What layers that run again do with it, over sequences of 16 tokens."""
    monkeypatch.setattr(recompute, "LONG", {"kept": 16, "again": 17}[request.param])
    return str(request.param)


def gradients(model: Any, **keys: Any) -> list[torch.Tensor]:
    made = learner(model, **keys)
    made.accumulate(batch(), [[0, 1, 2, 3], [4, 5]])
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    ("kind", "lora"),
    [("qwen2", False), ("qwen2", True), ("gpt2", False), ("gpt_neox", False), ("gemma2", False), ("gpt_oss", False)],
)
@pytest.mark.usefixtures("attention")
def test_gradients_do_not_depend_on_which_layers_run_again(kind: str, lora: bool, share: bool) -> None:
    """To the bit: the same operations over the same numbers, some of them twice."""
    kept = gradients(tiny(kind, lora=lora), gradient_checkpointing="none", share_prefixes=share)
    assert max(float(g.abs().max()) for g in kept) > 1e-3
    for layers in (1, 2, LAYERS, "all", "auto"):
        again = gradients(tiny(kind, lora=lora), gradient_checkpointing=layers, share_prefixes=share)
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True)), layers


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_the_first_layers_run_again_and_no_others(kind: str) -> None:
    model = tiny(kind)
    layers, ran = layers_of(model), Counter[int]()
    assert len(layers) == LAYERS
    for i, layer in enumerate(layers):
        inner = next(m for m in layer.modules() if isinstance(m, nn.LayerNorm) or type(m).__name__.endswith("RMSNorm"))
        inner.register_forward_hook(lambda *_, i=i: ran.update([i]))
    for first, counts in ((0, [1, 1, 1]), (2, [2, 2, 1]), (LAYERS, [2, 2, 2])):
        ran.clear()
        learner(model, gradient_checkpointing=first, share_prefixes=False).accumulate(batch(), [[0, 1]])
        assert [ran[i] for i in range(LAYERS)] == counts


class Count(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func.name()] += 1
        return func(*args, **(kwargs or {}))


def attentions(first: int, rows: list[int], samples: list[Sample]) -> int:
    """Runs of fused attention; all else of a layer that runs again is computed twice."""
    made = learner(tiny(), gradient_checkpointing=first, share_prefixes=False)
    with Count() as count:
        made.accumulate(samples, [rows])
    assert count.ran["aten::silu"] == LAYERS + first
    return count.ran["aten::_scaled_dot_product_flash_attention_for_cpu"] // len(rows)


def test_attention_runs_again_where_it_is_not_kept(attention: str) -> None:
    assert attentions(0, [0], batch()) == LAYERS
    assert attentions(LAYERS, [0], batch()) == {"kept": LAYERS, "again": 2 * LAYERS}[attention]
    assert attentions(1, [0], batch()) == {"kept": LAYERS, "again": LAYERS + 1}[attention]


def test_attention_is_kept_by_the_longest_sequence_of_a_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mixed one too; and each microbatch decides anew. The default stands between what was measured."""
    assert recompute.LONG == 4096
    short, *rest = batch()
    short = replace(short, response=short.response[:5], advantages=short.advantages[:5], logprobs=short.logprobs[:5])
    samples = [short, *rest]
    monkeypatch.setattr(recompute, "LONG", 16)
    assert attentions(LAYERS, [0], samples) == 2 * LAYERS  # 5 + 5 tokens, the last of which is not read
    assert attentions(LAYERS, [1], samples) == LAYERS
    assert attentions(LAYERS, [0, 1], samples) == LAYERS
    made = learner(tiny(), gradient_checkpointing="all", share_prefixes=False)
    with Count() as count:
        made.accumulate(samples, [[1], [0], [2]])
    assert count.ran["aten::_scaled_dot_product_flash_attention_for_cpu"] == (1 + 2 + 1) * LAYERS
    assert not made.recompute.first


def test_nothing_is_left_on_the_model() -> None:
    model = tiny()
    before = [dict(vars(m)) for m in model.modules()]
    metrics = learner(model, gradient_checkpointing=2, lr=1e-3).update(batch(), version=0)
    assert metrics["train/recomputed_layers"] == 2
    assert not any(m.training or "forward" in vars(m) for m in model.modules())
    assert [list(m) for m in before] == [list(vars(m)) for m in model.modules()]


def saved_bytes(model: Any, first: int) -> int:
    """Bytes that a forward keeps for backward, weights and repeated tensors left out."""
    made, found = learner(model, share_prefixes=False), {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    microbatch = made._pack(batch(), [0, 1, 2, 3])
    kept = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with kept, made.recompute.open(first, microbatch), pack_attention(model, microbatch):
        made.passes.loss(model, microbatch)
    return sum(t.untyped_storage().nbytes() for at, t in found.items() if at not in weights)


def auto(monkeypatch: pytest.MonkeyPatch, free: float | None, **keys: Any) -> Learner:
    monkeypatch.setattr(recompute, "free_bytes", lambda device: free)
    return learner(tiny(), gradient_checkpointing="auto", share_prefixes=False, **keys)


def test_what_a_layer_keeps_is_measured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of one layer, less its input, is what keeping it adds to a whole forward. Attention of these short
    sequences is not kept, so the entry that memory is planned with is more than a layer that runs again holds.
    """
    made = auto(monkeypatch, 1e12)
    made.accumulate(batch(), [[0, 1, 2, 3]])
    kept = made.recompute.kept
    assert kept is not None
    width = 32 * 4  # in float32; so much comes out of attention too, and a log-sum-exp of each head
    assert kept.entry == width + width + 4 * 4
    microbatch = made._pack(batch(), [0, 1, 2, 3])
    none, two = saved_bytes(tiny(), 0), saved_bytes(tiny(), 2)
    assert (none - two) / 2 / microbatch.tokens == kept.whole - width
    assert kept.whole > 8 * kept.entry


def test_auto_runs_as_few_again_as_memory_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = auto(monkeypatch, 1e12)
    metrics = made.update(batch(), version=0)
    assert metrics["train/recomputed_layers"] == 0
    kept = made.recompute.kept
    assert kept is not None
    assert metrics["train/layer_token_bytes"] == kept.whole
    tokens, logits = 6 * 16, 4 * 4 * 37 * 6 * 12  # six rows of 5 + 12 tokens, the last of which is not read
    gradients_ = sum(4 * p.numel() for p in made.model.parameters())
    two = tokens * (2 * kept.entry + 2 * kept.whole) + logits + gradients_
    for free, layers in ((two + 1, 2), (two - 1, LAYERS), (0.0, LAYERS)):
        assert auto(monkeypatch, free).update(batch(), version=0)["train/recomputed_layers"] == layers
    assert auto(monkeypatch, None).update(batch(), version=0)["train/recomputed_layers"] == LAYERS  # on a CPU
    assert "train/layer_token_bytes" not in auto(monkeypatch, None).update(batch(), version=0)


def test_fewest_layers_by_hand() -> None:
    """Ten tokens, four layers that keep 100 or 10: 5,000 with none again; 10 (10 + 400) = 4,100 with one; 3,200; 2,300
    with three and 2,400 with all, one of which is at work in either case. 50 more are logits."""
    kept = Kept(whole=100.0, entry=10.0)
    for free, first in ((5050, 0), (5049, 1), (4150, 1), (4149, 2), (3250, 2), (3249, 3), (2350, 3), (2349, 4), (0, 4)):
        assert fewest_layers(kept, layers=4, tokens=10, logits=50, free=free) == first


def test_what_the_key_takes() -> None:
    """A switch is what it was before; runs that were recorded with one go on."""
    for given, meant in ((True, "all"), (False, "none"), ("auto", "auto"), (7, 7), (0, 0)):
        assert load_config("", {"update.gradient_checkpointing": given}).update.gradient_checkpointing == meant
    for text, value in (("none", "none"), ("12", 12), ("true", True)):
        assert read_value(text, Layers) == value
    for wrong in ("some", -1, 1.5):
        with pytest.raises(ConfigError, match=r'gradient_checkpointing: must be "all", "none", "auto" or a number'):
            load_config("", {"update.gradient_checkpointing": wrong})
    with pytest.raises(ConfigError, match='= 4, but the model has 3 layers: set it to "all"'):
        learner(tiny(), gradient_checkpointing=4)


def test_a_model_whose_layers_are_not_found_is_refused_by_the_key() -> None:
    model = tiny()
    model.config.num_hidden_layers = 7
    with pytest.raises(ConfigError, match=r'not to be found: set update\.gradient_checkpointing = "none"'):
        learner(model)
    learner(model, gradient_checkpointing="none").update(batch(), version=0)
