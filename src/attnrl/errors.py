"""The errors users meet. Each is also a stdlib error, so callers need not know ours. And hints at names they know."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile


class AttnRLError(Exception):
    """Base of every error a user can cause; its message says what to do. The command line exits with 2."""


class ConfigError(AttnRLError, ValueError):
    """A key or value in a preset, a TOML file or a flag is wrong; the message names the key."""


class DataError(AttnRLError, ValueError):
    """A data file or one of its rows is wrong; the message names file:row."""


class MissingFileError(AttnRLError, FileNotFoundError):
    """A file or directory the user named does not exist."""


@contextmanager
def reading(file: Path, checkpoint: Path, *also: type[Exception]) -> Iterator[None]:
    """While open, a file of a checkpoint is read: where it is missing or holds a part, that is said.

    One that may not be read is no such case. `also`: what else its reader raises of a part.
    """
    broken: tuple[type[Exception], ...] = (FileNotFoundError, EOFError, ValueError, UnpicklingError, BadZipFile, *also)
    try:
        yield
    except PermissionError:
        raise
    except broken as error:
        raise cut_short(file, checkpoint) from error


def cut_short(file: Path, checkpoint: Path) -> MissingFileError:
    """What is said of a file that a checkpoint lost, or holds a part of."""
    return MissingFileError(
        f"{file} is missing or cut short; remove {checkpoint} to go on from the checkpoint before it"
    )


class MissingExtraError(AttnRLError, ImportError):
    """A feature needs an optional package; the message names the extra to install."""


class TrainingError(AttnRLError, RuntimeError):
    """Training cannot go on, for example after repeated non-finite gradients."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the work: in good order, where a message says what goes on from there, or at once, without one."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


@dataclass(frozen=True, slots=True)
class Asked:
    """While open, a part is asked, which may be somebody's own: an error that leaves it gets a note of it, unless it
    says itself what to do, and the part cannot end the process.
    """

    key: str  # of the config
    part: str  # its kind and name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SystemExit):
            raise TrainingError(f"{self.key}: the {self.part} called sys.exit({error.code!r}); let it raise") from error
        if isinstance(error, Exception) and not isinstance(error, AttnRLError) and not hasattr(error, "__notes__"):
            error.add_note(f"{self.key}: raised by the {self.part}")


ALIASES = {"learning_rate": "lr", "kl_coef": "kl_weight", "beta": "kl_weight", "max_tokens": "max_response_tokens"}
ALIASES |= {
    "max_new_tokens": "max_response_tokens",
    "batch_size": "prompts",
    "num_generations": "group",
    "steps": "iterations",
}


def near(name: str, known: Any) -> str:
    """A hint at the nearest known name, empty where none is near.

    >>> near("fcy", ["fci", "entropy"]), near("attnrl", ["s_attnrl", "attnrl_1p5b"])
    ("; did you mean 'fci'?", "; did you mean 'attnrl_1p5b'?")
    >>> near("update.learning_rate", ["update.lr_warmup_updates", "update.lr"])
    "; did you mean 'update.lr'?"
    """
    names = list(known)
    said = ALIASES.get(name.rpartition(".")[2])
    meant = [one for one in names if said and one.rpartition(".")[2] == said]
    begins = [one for one in names if len(name) > 3 and one.startswith(name)]
    found = meant or begins[:1] or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def listed(names: Any) -> str:
    return ", ".join(names) or "none"
