"""attnrl warmup --output DIR [--seconds S] [--shape.KEY VALUE ...]

Trains a small model on worked solutions of made-up tasks, so that a base policy
exists without any download; or a model of yours (--model) on the prompts and
responses of a file (--data). Writes a Hugging Face model and tokenizer,
metrics.jsonl and warmup.json into the output directory.

Examples:
  attnrl warmup --output runs/base --seconds 300
  attnrl warmup --output runs/base --seconds 300 --shape.layers 8 \\
    --shape.width 512 --shape.heads 8 --shape.kv-heads 4
  attnrl eval --model runs/base --output results/base  # how good it is
  attnrl warmup --output runs/mine --model MODEL --data rows.jsonl \\
    --prompt question --response answer --lr 1e-5 --tokens 2000000
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attnrl.cli.flags import read_flags
from attnrl.config import Section, TaskConfig, check_used, load_config
from attnrl.errors import ConfigError
from attnrl.launch.models import model_path
from attnrl.local.pairs import PairFile, Pairs
from attnrl.local.shape import Shape
from attnrl.local.warmup import Warmup, prepare_warmup
from attnrl.local.warmup_options import WarmupOptions

SHORT = {"device": "engine.local.device", "dtype": "model.dtype"}


class WarmupFlags(Section):
    """The flags of `attnrl warmup`."""

    output: Path
    """Directory to write to; it must not hold a model yet."""
    model: str | None = None
    """Start from this model directory or hub name ("demo": comes with attnrl), with its tokenizer, not a new model."""
    data: str | None = None
    """Learn the responses of this file (parquet, json, jsonl, .gz; or a hub name) instead of those of made-up tasks."""
    prompt: str = "prompt"
    """Its column with the prompt: text, or a chat with one user message."""
    response: str = "response"
    """Its column with the response."""
    template: str = "{problem}"
    """Text around a prompt of --data, before the model's chat template."""
    training: WarmupOptions = WarmupOptions(seconds=300.0)
    shape: Shape = Shape()
    task: TaskConfig = TaskConfig()


def main(argv: list[str]) -> None:
    """Warm up, save, and say how good the model is."""
    arguments, overrides = read_flags(WarmupFlags, argv, str(__doc__), flat="training", short=SHORT)
    console, config = Console(), load_config("", overrides)
    check_used(config, "attnrl warmup", set(SHORT.values()))
    run = prepare_warmup(
        arguments.output,
        arguments.task,
        arguments.training,
        shape=arguments.shape,
        model=model_path(arguments.model) if arguments.model is not None else None,
        pairs=pairs_of(arguments),
        device=config.engine.local.device,
        dtype=config.model.dtype,
    )
    count = sum(p.numel() for p in run.model.parameters())
    where = f"{count / 1e6:.2f}M parameters on {run.model.device}, {run.model.dtype}"
    console.print(f"{where}; {run.options.batch_tokens:,} tokens an update", highlight=False)
    if isinstance(run.source, Pairs):
        console.print(f"{len(run.source.train)} pairs, {len(run.source.test)} more held out", highlight=False)
        if left := run.source.left_out:
            console.print(f"{len(left)} rows are longer than a batch and left out, the first is {left[0]}")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("making the first batch", total=1.0)

        def observe(share: float, metrics: dict[str, float]) -> None:
            line = describe(run, metrics)
            bar.update(task, completed=min(1.0, share), description=line)
            if "warmup/seconds" in metrics:
                speed = metrics["warmup/tokens_per_second"]
                console.print(f"{metrics['warmup/seconds']:.0f} s  {line}  {speed:,.0f} tokens/s", highlight=False)

        run.train(observe)
    run.save(arguments.output)
    console.print(f"{describe(run, run.history[-1])}; model written to {arguments.output}", highlight=False)


def pairs_of(flags: WarmupFlags) -> PairFile | None:
    """Where the user's own pairs are; the flags that say so need --data."""
    if flags.data is not None:
        return PairFile(flags.data, flags.prompt, flags.response, flags.template)
    if idle := sorted({"prompt", "response", "template"} & flags.model_fields_set):
        raise ConfigError(f"--{idle[0]} is set, but without --data nothing takes it")
    return None


def describe(run: Warmup, metrics: dict[str, float]) -> str:
    """One line of what is known by now."""
    if not metrics:
        return "making the first batch"
    parts = [f"{metrics['warmup/tokens'] / 1e6:.1f}M tokens"]
    if "warmup/loss" in metrics:
        parts.append(f"loss {metrics['warmup/loss']:.3f}")
    if "warmup/held_out_loss" in metrics:
        parts.append(f"held-out loss {metrics['warmup/held_out_loss']:.3f}")
    if run.accuracy is not None:
        parts.append(f"held-out accuracy {run.accuracy:.1%}")
    return "  ".join(parts)
