"""Loading and taking apart Hugging Face decoder-only models."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrl.attention.head import widen_head
from attnrl.config import ModelConfig
from attnrl.data.files import unreachable
from attnrl.errors import ConfigError, MissingExtraError, MissingFileError, listed, near

# Any of these makes a directory one with a tokenizer: the fast form, or the vocabulary of a slow one.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
LEFTOVERS = {"training_args.bin", "optimizer.bin", "scheduler.bin", "sampler.bin"}  # of a trainer: no weights
OLDEST = (8, 0)  # compute capability that flash attention, Triton and bfloat16 need
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(device: str = "auto") -> torch.device:
    """The device of that name; "auto" is the CUDA device where there is one that will do, else the CPU."""
    if device == "auto":
        unfit = _no_gpu(None)
        if unfit and torch.cuda.is_available():
            warnings.warn(f"{unfit}: the CPU works instead", stacklevel=2)
        return torch.device("cpu" if unfit else "cuda")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f'device must be "auto", "cpu" or "cuda[:n]", not {device!r}') from error
    if picked.type == "cuda" and (unfit := _no_gpu(picked.index)):
        raise ConfigError(f"device is {device!r}, but {unfit}; use --device cpu")
    return picked


def _no_gpu(index: int | None) -> str:
    """Why that CUDA device cannot be used; empty where it can."""
    if not torch.cuda.is_available():
        return "this machine has no CUDA device"
    if index is not None and index >= torch.cuda.device_count():
        return f"this machine has {torch.cuda.device_count()} CUDA device(s), counted from 0"
    found = torch.cuda.get_device_capability(index)
    if torch.version.hip is None and found < OLDEST:
        wanted, has = ("{}.{}".format(*version) for version in (OLDEST, found))
        return f"{torch.cuda.get_device_name(index)} has compute capability {has}; the kernels need {wanted} (Ampere)"
    return ""


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; "auto" is bfloat16 on CUDA, float32 elsewhere."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}, not {dtype!r}")
    return DTYPES[dtype]


def check_model_path(name_or_path: str | Path, *, weights: bool = True) -> str:
    """The name as a string; raises when it is a local path without a model in it, with its `weights` or, where an
    engine keeps them in its own way, without. Loads nothing.
    """
    name = os.path.expanduser(str(name_or_path))
    if Path(name).is_dir():
        if not Path(name, "config.json").is_file():
            raise MissingFileError(f"{name} holds no config.json: a Hugging Face model directory is needed")
        found = {file.name for file in Path(name).iterdir() if file.suffix in (".safetensors", ".bin")}
        if weights and not found - LEFTOVERS:
            raise MissingFileError(
                f"{name} holds no weights (*.safetensors or *.bin): copy them beside its config.json"
                + (f"; a trainer left only {listed(sorted(found))}" if found else "")
            )
        return name
    looks_local = name.startswith((".", "/")) or name.count("/") != 1 or isinstance(name_or_path, Path)
    if looks_local or name.startswith("runs/"):  # where our own commands write
        raise MissingFileError(
            f"no model or run directory {name}; give one, or a Hugging Face model directory or a hub name owner/model, "
            f"or make a small model with `attnrl warmup --output {name}`"
        )
    return name


def check_reachable(name: str) -> None:
    """Raise within seconds where a hub name is neither in the cache nor to be had: the hub's client tries for long."""
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(name).is_dir() or constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    if reason := unreachable(constants.ENDPOINT):
        raise MissingFileError(
            f"no model directory {name}, and the hub ({constants.ENDPOINT}) cannot be reached: {reason}; "
            "check the path or the network, or name the directory of a download"
        )


def load_weights(
    name_or_path: str | Path, *, device: str = "auto", dtype: str = "auto", float32_logits: bool = True
) -> Any:
    """The model by directory or hub name, on the device, as `prepare_model` makes it.

    dtype: "auto" (bfloat16 on CUDA, float32 elsewhere), "float32", "bfloat16".
    """
    name = check_model_path(name_or_path)
    target = pick_device(device)
    torch_dtype = pick_dtype(dtype, target)
    check_reachable(name)
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name)
        if hasattr(config, "attention_dropout"):
            config.attention_dropout = 0.0
        # sampler, scorer and learner put attention of their own in place; eager is what every architecture has
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                name, config=config, dtype=torch_dtype, attn_implementation="eager"
            )
    except OSError as error:
        raise MissingFileError(f"cannot load model {name!r}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"model {name!r} cannot be used: {error}") from error
    return prepare_model(model.to(target), float32_logits=float32_logits)


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer of a model directory or hub name.

    A directory whose tokenizer_config.json names the plain tokenizers class gets exactly its tokenizer.json: for some
    model types (Qwen2) AutoTokenizer would put the family's own splitting rules over it.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if Path(name).is_dir() and not any(Path(name, file).is_file() for file in TOKENIZER_FILES):
        raise MissingFileError(
            f"{name} holds a model but no tokenizer (tokenizer.json or another of its kinds); copy the tokenizer files "
            "of the model it was made from, or write them with tokenizer.save_pretrained"
        )
    check_reachable(str(name))
    file = Path(name, "tokenizer_config.json")
    declared = json.loads(file.read_text("utf-8")).get("tokenizer_class") if file.is_file() else None
    plain_class = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return (PreTrainedTokenizerFast if plain_class else AutoTokenizer).from_pretrained(str(name))


def prepare_model(model: Any, *, float32_logits: bool = True) -> Any:
    """The model in eval mode with every dropout off: sampler, scorer and learner must see one distribution.

    `float32_logits`: those of a model in half precision are not rounded to it.
    """
    if float32_logits:
        widen_head(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model.eval()


def lora_layers(model: Any, options: ModelConfig) -> list[nn.Module]:
    """The layers that get adapters. ConfigError where one of the targets that the user set, or all of them, are none of
    the model's.
    """
    layers = {n: m for n, m in model.named_modules() if getattr(getattr(m, "weight", None), "ndim", 0) == 2}
    ends = {target: {n for n in layers if f".{n}".endswith(f".{target}")} for target in options.lora_targets}
    missing = [target for target, names in ends.items() if not names]
    if missing == list(ends) or (missing and "lora_targets" in options.model_fields_set):
        name, known = "".join(missing[:1]), list(dict.fromkeys(n.rpartition(".")[2] for n in layers))
        raise ConfigError(
            f"model.lora_targets: the model has no layer {name!r}{near(name, known)}; it has {listed(known)}"
        )
    return [layers[name] for name in set[str]().union(*ends.values())]


def add_lora(model: Any, options: ModelConfig, *, seed: int) -> Any:
    """The model wrapped by peft: frozen base, trainable adapters of the model's dtype, the same for the same seed."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtraError("LoRA needs peft: pip install 'attnrl[lora]'") from error
    lora_layers(model, options)
    config = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]  # peft divides by the rank: any number will do
        lora_dropout=0.0,
        target_modules=list(options.lora_targets),
        task_type="CAUSAL_LM",
    )
    # adapters share the model's dtype: the optimizer keeps its own float32 copy of them
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:
            raise ConfigError(f"model.lora_targets: {error}") from error
    return prepare_model(wrapped, float32_logits=False)


def is_lora(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def plain(model: Any) -> Any:
    """The Hugging Face model itself; adapters, where there are any, stay active inside it."""
    return model.get_base_model() if is_lora(model) else model


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """The base model while the context is open: the frozen reference of a LoRA policy."""
    with model.disable_adapter():
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own progress bars: a checkpoint every few minutes would fill the console with them."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
