"""Warm-up: batches are right, the loss is the mean over solution tokens, training learns, and models come back."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnrl.cli import run as command_line
from attnrl.config import TaskConfig
from attnrl.data.tasks import make_tasks
from attnrl.errors import DataError
from attnrl.local.examples import batches, make_batch, make_examples
from attnrl.local.pairs import PairFile
from attnrl.local.shape import Shape
from attnrl.local.warmup import Warmup, prepare_warmup
from attnrl.local.warmup_options import WarmupOptions
from processes import session, wait_until

SPEC = TaskConfig(operations=(1, 2), modulus=5, distractors=(0, 0), sides=(0, 0), checks=(0, 0), givens=0)
DEMO = Path(str(resources.files("attnrl"))) / "assets" / "demo_model"
SHAPE = Shape(layers=2, width=64, heads=2, kv_heads=1)
OPTIONS = WarmupOptions(
    tokens=20_000, batch_tokens=512, evaluations=2, evaluation_tasks=8, workers=0, warmup_updates=5, lr=5e-3
)


def warmup(path: Path, options: WarmupOptions = OPTIONS, dtype: str = "float32") -> Warmup:
    return prepare_warmup(path, SPEC, options, shape=SHAPE, device="cpu", dtype=dtype)


def test_a_batch_holds_whole_tasks_and_predicts_only_solutions(tmp_path: Path) -> None:
    run = warmup(tmp_path)
    batch = make_batch(run.source, 3)
    assert sum(batch.lengths) == len(batch.ids_T) == 512
    np.testing.assert_array_equal(batch.ids_T[batch.source_N + 1], batch.targets_N)
    examples = make_examples(run.source, "train", 3_000_000, len(batch.lengths) - 1)
    text = "".join(run.tokenizer.decode(e.prompt) + run.tokenizer.decode(e.solution) for e in examples)
    assert run.tokenizer.decode(batch.ids_T[: batch.tokens]) == text
    assert "".join(e.task.solution + "<eos>" for e in examples) == run.tokenizer.decode(batch.targets_N)
    assert "".join(e.task.problem + "\n" + e.task.solution + "<eos>" for e in examples) == text


def test_worker_processes_give_the_same_batches_in_order(tmp_path: Path) -> None:
    recipe = warmup(tmp_path).source
    here = list(itertools.islice(batches(recipe, workers=0), 4))
    stream = batches(recipe, workers=1)
    there = list(itertools.islice(stream, 4))
    stream.close()
    assert all(np.array_equal(a.ids_T, b.ids_T) for a, b in zip(here, there, strict=True))
    assert not np.array_equal(here[0].ids_T, here[1].ids_T)


@pytest.mark.parametrize("microbatch", [None, 128])
def test_the_loss_is_the_mean_over_solution_tokens(tmp_path: Path, microbatch: int | None) -> None:
    run = warmup(tmp_path, OPTIONS.model_copy(update={"microbatch_tokens": microbatch}))
    batch = make_batch(run.source, 0)
    examples = make_examples(run.source, "train", 0, len(batch.lengths) - 1)
    terms = []
    for e in examples:
        ids = torch.tensor(np.concatenate([e.prompt, e.solution])[None].astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(run.model(ids).logits[0], -1)
        terms += [-logprobs[len(e.prompt) + t - 1, int(token)].item() for t, token in enumerate(e.solution)]
    assert run.update(batch, lr=1e-9).item() == pytest.approx(float(np.mean(terms)), abs=1e-5)


def test_training_learns_and_saves_a_model_that_comes_back(tmp_path: Path) -> None:
    run = warmup(tmp_path, OPTIONS.model_copy(update={"save_dtype": "float16"}))
    shares: list[float] = []
    final = run.train(lambda share, _: shares.append(share))
    assert shares[0] == 0.0
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
    assert again.encode(example.task.problem + "\n") == example.prompt.tolist()
    assert loaded.generation_config.eos_token_id == run.tokenizer.eos_token_id
    more = prepare_warmup(tmp_path / "more", SPEC, OPTIONS, model=tmp_path, device="cpu")
    assert more.update(make_batch(more.source, 7), 1e-9).item() < 1.2 * final["warmup/loss"]


def test_bfloat16_training_saves_its_float32_masters(tmp_path: Path) -> None:
    run = warmup(tmp_path, dtype="bfloat16")
    run.update(make_batch(run.source, 0), lr=1e-3)
    run.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    weight = loaded.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())


def test_target_accuracy_ends_training_early(tmp_path: Path) -> None:
    run = warmup(tmp_path, OPTIONS.model_copy(update={"target_accuracy": 0.0, "evaluations": 4}))
    run.train()
    assert run.tokens < 10_000


def test_target_loss_ends_training_early_and_waits_for_the_accuracy(tmp_path: Path) -> None:
    run = warmup(tmp_path, OPTIONS.model_copy(update={"target_loss": 100.0, "evaluations": 4}))
    run.train()
    assert run.tokens < 10_000
    both = {"target_loss": 100.0, "target_accuracy": 1.1, "evaluations": 4}
    run = warmup(tmp_path / "both", OPTIONS.model_copy(update=both))
    assert run.train()["warmup/tokens"] >= 10_000


def test_the_learning_rate_follows_time_or_tokens_whichever_is_ahead(tmp_path: Path) -> None:
    run = warmup(tmp_path, WarmupOptions(seconds=100.0, tokens=1000, evaluation_tasks=1))
    run.tokens = 300
    assert run.share(20.0) == pytest.approx(0.3)
    assert run.share(60.0) == pytest.approx(0.6)
    options = WarmupOptions(seconds=1.0, lr=1.0, final_lr=0.0, warmup_updates=0)
    assert [options.learning_rate(s, 0) for s in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.5, 0.0])


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="--seconds"):
        WarmupOptions()
    with pytest.raises(ValueError, match="kv_heads"):
        Shape(heads=6, kv_heads=4)
    (tmp_path / "config.json").write_text("{}")
    assert command_line(["warmup", "--output", str(tmp_path)]) == 2
    assert "already holds a model" in capsys.readouterr().err


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def own_rows(count: int) -> list[dict]:
    """Prompts and responses in words that the demo's tokenizer knows."""
    tasks = make_tasks(TaskConfig(operations=(1, 2), modulus=11, wording="equations", sides=(0, 0)), "train", count)
    return [{"Question": t.problem, "worked": t.solution} for t in tasks]


def test_the_rows_of_a_file_are_learned_and_some_held_out(tmp_path: Path) -> None:
    rows = own_rows(40)
    file = write_rows(tmp_path / "rows.jsonl", [*rows, rows[0]])  # one row twice
    options = OPTIONS.model_copy(update={"tokens": 6000, "lr": 1e-3, "batch_tokens": 400, "microbatch_tokens": 150})
    pairs = PairFile(file, "question", "worked")
    run = prepare_warmup(tmp_path / "out", TaskConfig(), options, model=DEMO, pairs=pairs, device="cpu")
    source = run.source
    held = {run.tokenizer.decode(e.prompt) for e in source.test}
    seen = {run.tokenizer.decode(e.prompt) for e in source.train}
    assert (len(held), len(source.train) + len(source.test)) == (3, 41)  # a sixteenth of 40 prompts, rounded up
    assert not held & seen
    assert held | seen == {row["Question"] + "\n" for row in rows}
    # batches: whole rows, every one once an epoch, loss on the response and its end token alone
    stream, counts = source.batches(0), Counter()
    while sum(counts.values()) < 2 * len(source.train):
        batch = next(stream)
        assert sum(batch.lengths) == len(batch.ids_T) == 400
        np.testing.assert_array_equal(batch.ids_T[batch.source_N + 1], batch.targets_N)
        counts.update(run.tokenizer.decode(batch.targets_N).split("<eos>")[:-1])
    assert {row["worked"] for row in rows} - set(counts) == {
        row["worked"] for row in rows if row["Question"] + "\n" in held
    }
    before = run.check()
    final = run.train()
    assert final["warmup/held_out_loss"] < before["warmup/held_out_loss"]
    assert 0.0 <= final["warmup/accuracy"] <= 1.0
    run.save(tmp_path / "out")
    made = json.loads((tmp_path / "out" / "warmup.json").read_text())
    assert made["data"] == {"file": file, "prompt": "question", "response": "worked", "template": "{problem}"}
    assert made["pairs"] == {"train": len(source.train), "held_out": len(source.test), "too_long": 0}


def test_the_held_out_loss_is_the_mean_over_response_tokens(tmp_path: Path) -> None:
    pairs = PairFile(write_rows(tmp_path / "rows.jsonl", own_rows(20)), "question", "worked")
    run = prepare_warmup(tmp_path / "out", TaskConfig(), OPTIONS, model=DEMO, pairs=pairs, device="cpu")
    terms = []
    for e in run.held_out:
        ids = torch.tensor(np.concatenate([e.prompt, e.solution])[None].astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(run.model(ids).logits[0], -1)
        terms += [-logprobs[len(e.prompt) + t - 1, int(token)].item() for t, token in enumerate(e.solution)]
    assert run.check()["warmup/held_out_loss"] == pytest.approx(float(np.mean(terms)), abs=1e-4)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "1?"}], r"rows\.jsonl:1: no column 'response'; columns found: prompt; .*--response"),
        ([{"prompt": "1?", "response": "1"}, {"prompt": "", "response": "1"}], r"rows\.jsonl:2: prompt is no text"),
        ([{"prompt": "1?", "response": None}], r"rows\.jsonl:1: response is no text or empty"),
        ([{"prompt": "1?", "response": "1"}], "1 different prompts of at most 512 tokens"),
        ([{"prompt": "1?", "response": "apples " * 600}, {"prompt": "2", "response": "1"}], "1 rows are longer: raise"),
    ],
)
def test_wrong_rows_of_a_file_are_named(tmp_path: Path, rows: list[dict], message: str) -> None:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=message):
        prepare_warmup(tmp_path / "out", TaskConfig(), OPTIONS, model=DEMO, pairs=PairFile(file), device="cpu")


def test_a_batch_suits_the_machine(tmp_path: Path) -> None:
    run = prepare_warmup(tmp_path, SPEC, WarmupOptions(seconds=1.0, evaluation_tasks=1), shape=SHAPE, device="cpu")
    assert (run.options.batch_tokens, run.options.microbatch_tokens) == (4096, 1024)
    assert len(make_batch(run.source, 0).ids_T) == 4096


def test_progress_is_told_within_an_update(tmp_path: Path) -> None:
    """A first word before any batch, then each pass of the first update, whatever an update takes."""
    run = warmup(tmp_path, OPTIONS.model_copy(update={"microbatch_tokens": 128}))
    heard: list[tuple[float, dict[str, float]]] = []
    tokens: list[int] = []
    batch = make_batch(run.source, 0)
    run.update(batch, 1e-9, tokens.append)
    assert len(tokens) > 2
    assert tokens == sorted(tokens)
    assert tokens[-1] <= batch.tokens
    fresh = warmup(tmp_path / "fresh", OPTIONS.model_copy(update={"microbatch_tokens": 128, "tokens": 1500}))
    fresh.train(lambda share, metrics: heard.append((share, metrics)))
    assert heard[0] == (0.0, {})
    assert set(heard[1][1]) == {"warmup/tokens"}  # the first update is still running
    assert "warmup/loss" in heard[2][1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_behind(tmp_path: Path, number: signal.Signals) -> None:
    """The command is stopped while its workers make batches: all processes of its session end."""
    argv = [sys.executable, "-m", "attnrl", "warmup", "--output", str(tmp_path / "out"), "--seconds", "600"]
    argv += ["--workers", "2", "--device", "cpu", "--batch-tokens", "512", "--evaluation-tasks", "4"]
    argv += ["--evaluations", "500", "--shape.layers", "1", "--shape.width", "64", "--shape.heads", "2"]
    argv += ["--shape.kv-heads", "1"]
    log = tmp_path / "out" / "metrics.jsonl"
    with (tmp_path / "said").open("w") as said:
        command = subprocess.Popen(argv, start_new_session=True, stdout=said, stderr=said)
    try:
        wait_until(lambda: log.exists() or command.poll() is not None)  # the first check: workers are at work
        assert len(session(command.pid)) >= 3, (tmp_path / "said").read_text()
        command.send_signal(number)
        command.wait(60)
        assert command.returncode != 0
        wait_until(lambda: not session(command.pid))
        assert session(command.pid) == []
    finally:
        for pid in session(command.pid):
            os.kill(pid, signal.SIGKILL)
