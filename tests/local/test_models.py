"""Loading models by directory and by hub name: what is missing is said, and at once."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import attnrl
from attnrl.config import load_config
from attnrl.errors import ConfigError, MissingFileError
from attnrl.launch.models import check_model
from attnrl.local.models import check_model_path, load_tokenizer

DEMO = Path(str(resources.files("attnrl"))) / "assets" / "demo_model"


def test_a_model_directory_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    for file in DEMO.iterdir():
        if not file.name.startswith(("tokenizer", "special", "chat")):
            shutil.copy(file, tmp_path)
    with pytest.raises(MissingFileError, match="holds a model but no tokenizer"):
        load_tokenizer(tmp_path)
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    shutil.copy(DEMO / "tokenizer_config.json", tmp_path)
    assert len(load_tokenizer(tmp_path)) == len(load_tokenizer(DEMO))


def test_a_model_directory_without_weights_is_refused_before_a_run_begins(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    said = r"model holds no weights \(\*\.safetensors or \*\.bin\): copy them beside its config\.json"
    with pytest.raises(MissingFileError, match=said):
        attnrl.train("demo", tmp_path / "run", overrides={"model.path": str(tmp_path / "model")})
    assert not (tmp_path / "run").exists()
    with pytest.raises(MissingFileError, match=said):
        check_model(str(tmp_path / "model"), load_config("demo", {"engine.name": "verl"}))
    for name in ("training_args.bin", "optimizer.bin", "scheduler.bin"):  # of transformers' Trainer, or accelerate
        (tmp_path / "model" / name).touch()
        with pytest.raises(MissingFileError, match=rf"{said}; a trainer left only .*{name}"):
            check_model_path(tmp_path / "model")
    own = load_config("demo", {"engine.name": "mine:factory"})  # may keep its weights in its own way
    assert check_model(str(tmp_path / "model"), own) == str(tmp_path / "model")
    for name in ("model-00001-of-00002.safetensors", "pytorch_model.bin"):
        (tmp_path / "model" / name).touch()
        assert check_model_path(tmp_path / "model") == str(tmp_path / "model")
        (tmp_path / "model" / name).unlink()
    assert check_model_path("owner/model") == "owner/model"


def test_a_hub_model_that_cannot_be_had_is_said_at_once(tmp_path: Path) -> None:
    # in a process of its own: huggingface_hub reads its address once; nothing listens there
    script = """
from attnrl.config import load_config
from attnrl.errors import MissingFileError
from attnrl.launch.models import check_engine, find_engine
from attnrl.local.models import load_weights
config = load_config("demo", {"engine.name": "verl"})
for ask in (load_weights, lambda model: check_engine(find_engine(config), config, model)):
    try:
        ask("people/model")
    except MissingFileError as error:
        print(error)
"""
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{refusing.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path)}
        environment.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
        )
    said = f"no model directory people/model, and the hub ({address}) cannot be reached"
    assert done.stdout.count(said) == 2, done.stderr


def test_a_model_that_transformers_does_not_know_is_named_before_anything_starts(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "model")
    for text, error, said in (
        ('{"model_type": "nosuch"}', ConfigError, "model '.*model' cannot be used: .*`nosuch`"),
        ('{"model_type": ', MissingFileError, "cannot load model '.*model': .*not a valid JSON"),
    ):
        (tmp_path / "model" / "config.json").write_text(text)
        with pytest.raises(error, match=said):
            attnrl.check("demo", overrides={"model.path": str(tmp_path / "model")}, say=lambda line: None)
