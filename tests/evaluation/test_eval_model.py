"""attnrl eval with a real model directory, end to end on the CPU."""

from __future__ import annotations

import json

import pytest

from attnrl import cli
from attnrl.config import TaskConfig
from attnrl.data.task_tokenizer import task_tokenizer
from attnrl.data.tasks import make_tasks


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny untrained model with the tokenizer of modulo-11 tasks."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("model")
    tokenizer = task_tokenizer(TaskConfig(modulus=11))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def test_a_model_is_evaluated_on_tasks_and_files(model, tmp_path, capsys) -> None:
    file = tmp_path / "held_out.jsonl"
    spec = ["--operations", "2,3", "--modulus", "11"]
    assert cli.run(["tasks", "--output", str(file), "--split", "test", "--count", "3", *spec]) == 0
    argv = ["eval", "--model", model, "--benchmarks", f"tasks,{file}", "--samples", "2", "--k", "1,2"]
    argv += ["--max-tokens", "12", "--temperature", "1", "--top-p", "1", "--task-count", "4", "--template", "{problem}"]
    argv += ["--data.tasks.operations", "2,3", "--data.tasks.modulus", "11", "--device", "cpu"]
    assert cli.run([*argv, "--output", str(tmp_path / "one"), "--chunk", "3"]) == 0
    assert cli.run([*argv, "--output", str(tmp_path / "two"), "--chunk", "100", "--rows", "2"]) == 0
    lines = (tmp_path / "one" / "responses.jsonl").read_text()
    assert lines == (tmp_path / "two" / "responses.jsonl").read_text()
    rows = [json.loads(line) for line in lines.splitlines()]
    problems = [task.problem for task in make_tasks(TaskConfig(operations=(2, 3), modulus=11), "test", 4)]
    assert [row["problem"] for row in rows if row["benchmark"] == "tasks"] == [p for p in problems for _ in range(2)]
    assert len({row["response"] for row in rows}) > 10  # a stream each
    results = json.loads((tmp_path / "one" / "results.json").read_text())
    assert list(results["benchmarks"]) == ["tasks", "held_out"]
    assert results["benchmarks"]["held_out"]["responses"] == 6


def test_a_template_the_tokenizer_cannot_read_is_refused(model, tmp_path, capsys) -> None:
    file = tmp_path / "held_out.jsonl"
    assert cli.run(["tasks", "--output", str(file), "--count", "3", "--modulus", "11"]) == 0
    assert cli.run(["eval", "--model", model, "--benchmarks", str(file), "--output", str(tmp_path / "out")]) == 2
    assert "--data.template '{problem}'" in capsys.readouterr().err
    assert cli.run(["eval", "--model", model, "--benchmarks", "tasks", "--output", str(tmp_path / "out")]) == 2
    assert "tasks of its own settings" in capsys.readouterr().err  # modulo 23
