"""Do all machines see the same files?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import NamedTemporaryFile

from attnrl.errors import ConfigError

Look = Callable[[tuple[str, ...]], Sequence[tuple[str, Sequence[str]]]]  # paths -> what each rank says (verbs.look)


def seeing(look: Look, paths: Sequence[Path], run_dir: Path | None) -> set[str]:
    """The machines of the ranks; raises where one does not see a path, or what is written to the run directory."""
    with NamedTemporaryFile(dir=run_dir, prefix=".seen-") if run_dir else nullcontext() as mark:
        wanted = [Path(mark.name), *paths] if mark else paths
        answers = look(tuple(str(path.absolute()) for path in wanted))
    for host, missing in answers:
        if missing:
            raise ConfigError(
                f"machine {host} does not see {missing[0]}: run directory and model must lie on a file system that all "
                "machines share, under the same path"
            )
    return {host for host, _ in answers}
