"""attnrl warmup --output DIR [--seconds S] [--shape.KEY VALUE ...]

Trains a small model on worked solutions of made-up tasks, so that a base policy
exists without any download. Writes a Hugging Face model and tokenizer,
metrics.jsonl and warmup.json into the output directory.

Examples:
  attnrl warmup --output runs/base --seconds 300
  attnrl warmup --output runs/base --seconds 300 --shape.layers 8 \\
    --shape.width 512 --shape.heads 8 --shape.kv-heads 4
  attnrl eval --model runs/base --output results/base    how good it is
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attnrl.cli.flags import read_flags
from attnrl.config import Section, TaskConfig, load_config
from attnrl.launch.models import model_path
from attnrl.local.warmup import Shape, WarmupOptions, prepare_warmup

SHORT = {"device": "engine.local.device", "dtype": "model.dtype"}


class WarmupFlags(Section):
    """The flags of `attnrl warmup`."""

    output: Path
    """Directory to write to; it must not hold a model yet."""
    model: str | None = None
    """Start from this model directory or hub name ("demo": comes with attnrl), with its tokenizer, not a new model."""
    training: WarmupOptions = WarmupOptions(seconds=300.0)
    shape: Shape = Shape()
    task: TaskConfig = TaskConfig()


def main(argv: list[str]) -> int | None:
    """Warm up, save, and say how good the model is."""
    arguments, overrides = read_flags(WarmupFlags, argv, str(__doc__), flat="training", short=SHORT)
    console, config = Console(), load_config("", overrides)
    run = prepare_warmup(
        arguments.output,
        arguments.task,
        arguments.training,
        shape=arguments.shape,
        model=model_path(arguments.model) if arguments.model is not None else None,
        device=config.engine.local.device,
        dtype=config.model.dtype,
    )
    count = sum(p.numel() for p in run.model.parameters())
    console.print(f"{count / 1e6:.2f}M parameters on {run.model.device}, {run.model.dtype}")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("warm-up", total=1.0)

        def observe(share: float, metrics: dict[str, float]) -> None:
            tokens = metrics["warmup/tokens"] / 1e6
            line = f"{tokens:.1f}M tokens  loss {metrics['warmup/loss']:.3f}  accuracy {run.accuracy:.1%}"
            bar.update(task, completed=min(1.0, share), description=line)
            if "warmup/accuracy" in metrics:
                speed = metrics["warmup/tokens_per_second"]
                console.print(f"{metrics['warmup/seconds']:.0f} s  {line}  {speed:,.0f} tokens/s", highlight=False)

        run.train(observe)
    run.save(arguments.output)
    console.print(f"held-out accuracy {run.accuracy:.1%}; model written to {arguments.output}")
    return 0
