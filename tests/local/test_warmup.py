"""Warm-up: batches are right, the loss is the mean over solution tokens, training learns, and models come back."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnrl.cli import run as command_line
from attnrl.config import TaskConfig
from attnrl.errors import ConfigError
from attnrl.local.examples import batches, make_batch, make_examples
from attnrl.local.warmup import Shape, Warmup, WarmupOptions, prepare_warmup

SPEC = TaskConfig(operations=(1, 2), modulus=5, distractors=(0, 0), sides=(0, 0), checks=(0, 0), givens=0)
SHAPE = Shape(layers=2, width=64, heads=2, kv_heads=1)
OPTIONS = WarmupOptions(
    tokens=20_000, batch_tokens=512, evaluations=2, evaluation_tasks=8, workers=0, warmup_updates=5, lr=5e-3
)


def warmup(path: Path, options: WarmupOptions = OPTIONS, dtype: str = "float32") -> Warmup:
    return prepare_warmup(path, SPEC, options, shape=SHAPE, device="cpu", dtype=dtype)


def test_a_batch_holds_whole_tasks_and_predicts_only_solutions(tmp_path: Path) -> None:
    run = warmup(tmp_path)
    batch = make_batch(run.recipe, 3)
    assert sum(batch.lengths) == len(batch.ids_T) == 512
    np.testing.assert_array_equal(batch.ids_T[batch.source_N + 1], batch.targets_N)
    examples = make_examples(run.recipe, "train", 3_000_000, len(batch.lengths) - 1)
    text = "".join(run.tokenizer.decode(e.prompt) + run.tokenizer.decode(e.solution) for e in examples)
    assert run.tokenizer.decode(batch.ids_T[: batch.tokens]) == text
    assert "".join(e.task.solution + "<eos>" for e in examples) == run.tokenizer.decode(batch.targets_N)
    assert "".join(e.task.prompt + e.task.solution + "<eos>" for e in examples) == text


def test_worker_processes_give_the_same_batches_in_order(tmp_path: Path) -> None:
    recipe = warmup(tmp_path).recipe
    here = list(itertools.islice(batches(recipe, workers=0), 4))
    stream = batches(recipe, workers=1)
    there = list(itertools.islice(stream, 4))
    stream.close()
    assert all(np.array_equal(a.ids_T, b.ids_T) for a, b in zip(here, there, strict=True))
    assert not np.array_equal(here[0].ids_T, here[1].ids_T)


@pytest.mark.parametrize("microbatch", [None, 128])
def test_the_loss_is_the_mean_over_solution_tokens(tmp_path: Path, microbatch: int | None) -> None:
    run = warmup(tmp_path, dataclasses.replace(OPTIONS, microbatch_tokens=microbatch))
    batch = make_batch(run.recipe, 0)
    examples = make_examples(run.recipe, "train", 0, len(batch.lengths) - 1)
    terms = []
    for e in examples:
        ids = torch.tensor(np.concatenate([e.prompt, e.solution])[None].astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(run.model(ids).logits[0], -1)
        terms += [-logprobs[len(e.prompt) + t - 1, int(token)].item() for t, token in enumerate(e.solution)]
    assert run.update(batch, lr=1e-9).item() == pytest.approx(float(np.mean(terms)), abs=1e-5)


def test_training_learns_and_saves_a_model_that_comes_back(tmp_path: Path) -> None:
    run = warmup(tmp_path, dataclasses.replace(OPTIONS, save_dtype="float16"))
    shares: list[float] = []
    final = run.train(lambda share, _: shares.append(share))
    assert shares[-1] >= 1.0
    assert run.tokens >= 20_000
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert final["warmup/loss"] < 0.75 * first["warmup/loss"]
    run.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    example = run.held_out[0]
    ids = torch.tensor(np.concatenate([example.prompt, example.solution])[None].astype(np.int64))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, run.model(ids).logits, atol=0.02, rtol=0.02)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.encode(example.task.prompt) == example.prompt.tolist()
    assert loaded.generation_config.eos_token_id == run.tokenizer.eos_token_id
    more = prepare_warmup(tmp_path / "more", SPEC, OPTIONS, model=tmp_path, device="cpu")
    assert more.update(make_batch(more.recipe, 7), 1e-9).item() < 1.2 * final["warmup/loss"]


def test_bfloat16_training_saves_its_float32_masters(tmp_path: Path) -> None:
    run = warmup(tmp_path, dtype="bfloat16")
    run.update(make_batch(run.recipe, 0), lr=1e-3)
    run.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    weight = loaded.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())


def test_target_accuracy_ends_training_early(tmp_path: Path) -> None:
    run = warmup(tmp_path, dataclasses.replace(OPTIONS, target_accuracy=0.0, evaluations=4))
    run.train()
    assert run.tokens < 10_000


def test_the_learning_rate_follows_time_or_tokens_whichever_is_ahead(tmp_path: Path) -> None:
    run = warmup(tmp_path, WarmupOptions(seconds=100.0, tokens=1000, evaluation_tasks=1))
    run.tokens = 300
    assert run.share(20.0) == pytest.approx(0.3)
    assert run.share(60.0) == pytest.approx(0.6)
    options = WarmupOptions(seconds=1.0, lr=1.0, final_lr=0.0, warmup_updates=0)
    assert [options.learning_rate(s, 0) for s in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.5, 0.0])


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--seconds"):
        WarmupOptions()
    with pytest.raises(ConfigError, match="kv_heads"):
        Shape(heads=6, kv_heads=4)
    (tmp_path / "config.json").write_text("{}")
    assert command_line(["warmup", "--output", str(tmp_path)]) == 2
    assert "already holds a model" in capsys.readouterr().err
