"""The live console of a run: one line an iteration, with the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from attnrl.algo.health import complaint
from attnrl.config import Config
from attnrl.progress import watched

HEADER = " prompts  right valid train length  cut steps entropy     kl tok/s    eta"  # after the iteration
LOOK = (3, 10)  # a run that does not learn says so after so many iterations, and every so many after that


def console_line(config: Config, console: Console | None = None) -> Callable[[dict[str, float]], None]:
    """An observer that prints one line an iteration, and says so where a run does not learn or cannot grade."""
    out = console or Console()
    iterations = config.run.iterations
    start, first, lines = 0.0, 0, 0
    seen: list[dict[str, float]] = []
    told = False

    def show(metrics: dict[str, float]) -> None:
        nonlocal lines, first, start, told
        done = int(metrics["iteration"])
        evaluated = {k: v for k, v in metrics.items() if k.startswith("eval/") and k.endswith("/pass@1")}
        if "train/samples" in metrics:
            if lines % 20 == 0:
                out.print(" " * len(f"{iterations}/{iterations}") + HEADER, style="bold", soft_wrap=True)
            if lines == 0:  # the clock starts with the iteration that this line ends, whatever came before
                first, start = done - 1, time.monotonic() - metrics.get("seconds/iteration", 0.0)
            lines += 1
            left = (time.monotonic() - start) / max(done - first, 1) * (iterations - done)
            out.print(_line(metrics, done, iterations, left), highlight=False, soft_wrap=True)
            seen.append(metrics)
            look = len(seen) == LOOK[0] or len(seen) % LOOK[1] == 0 or done == iterations
            if metrics.get("verify/errors") and (look or not told):
                told = True
                out.print(_ungraded(metrics), style="bold red", highlight=False, soft_wrap=True)
            if look:
                said = complaint(
                    seen,
                    max_response_tokens=config.sampling.max_response_tokens,
                    delta=config.algo.delta,
                    branching=metrics.get("trees/most_points") != 0,
                )
                if said:
                    out.print(said, style="bold red", highlight=False, soft_wrap=True)
        for name, value in evaluated.items():
            low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
            band = f"  [95 % {low:.1%} to {high:.1%}]" if low is not None and high is not None else ""
            title = name.removeprefix("eval/").removesuffix("/pass@1")
            errors = metrics.get(f"eval/{title}/errors")
            wrong = f"; {errors:.0f} responses could not be graded and count as wrong" if errors else ""
            out.print(f"held-out {title} after {done}: {value:.1%}{band}{wrong}", style="green", highlight=False)

    return show


@contextmanager
def live_line(console: Console) -> Iterator[None]:
    """While open, a terminal shows below what is printed what the run does now, and how far it is."""
    if not console.is_terminal:
        yield
        return
    status, shown, last = console.status(""), "", 0.0

    def watch(what: str, done: int, of: int) -> None:
        nonlocal shown, last
        if not what:
            status.stop()
        elif what != shown or time.monotonic() - last > 0.2:
            shown, last = what, time.monotonic()
            status.update(f"{what} {done:,} of {of:,}" if of else what)
            status.start()

    try:
        with watched(watch):
            yield
    finally:
        status.stop()


def _line(m: dict[str, float], done: int, iterations: int, left: float) -> str:
    speed = m.get("generate/tokens", 0.0) / max(m.get("seconds/generate", 0.0), 1e-9)
    return (
        f"{done:>{len(str(iterations))}}/{iterations}"
        f"{m.get('batch/prompts', 0):>8.0f}{m.get('trunks/accuracy', 0):>7.1%}"
        f"{m.get('both/valid', m.get('trunks/valid', 0)):>6.0%}{m.get('train/samples', 0):>6.0f}"
        f"{m.get('generate/length', 0):>7.0f}{m.get('generate/truncated_share', 0):>5.0%}"
        f"{m.get('trunks/steps', 0):>6.1f}{m.get('policy/entropy', float('nan')):>8.3f}"
        f"{_small(m.get('policy/kl', float('nan'))):>7}{speed:>6.0f}{time_span(left):>7}"
    )


def _small(value: float) -> str:
    """A number that is mostly far below 1, in six characters.

    >>> _small(0.01234), _small(6.3174), _small(637566.6549), _small(float("nan"))
    ('0.0123', '6.32', '6e+05', 'nan')
    """
    if abs(value) >= 1000:
        return f"{value:.0e}"
    return f"{value:.3g}" if abs(value) >= 1 else f"{value:.4f}"


def _ungraded(metrics: dict[str, float]) -> str:
    """How many responses of an iteration have no verdict, by kind of error.

    >>> _ungraded({"verify/errors": 7.0, "verify/timeout": 2.0, "verify/error": 5.0})
    '7 responses could not be graded and were left out (timeout 2, error 5); `attnrl check` shows why'
    """
    kinds = {key.partition("/")[2]: count for key, count in metrics.items() if key.startswith("verify/")}
    total = kinds.pop("errors")
    by_kind = ", ".join(f"{kind} {count:.0f}" for kind, count in kinds.items())
    return f"{total:.0f} responses could not be graded and were left out ({by_kind}); `attnrl check` shows why"


def time_span(seconds: float) -> str:
    """Seconds for people.

    >>> time_span(75), time_span(7300)
    ('1m15s', '2h01m')
    """
    whole = round(seconds)
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m" if whole >= 3600 else f"{whole // 60}m{whole % 60:02d}s"
