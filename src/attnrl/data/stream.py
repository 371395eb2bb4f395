"""The prompt stream: shuffled anew each epoch, any number of prompts each time, resumable from its position alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from attnrl.errors import DataError
from attnrl.types import Prompt, content_hash


class PromptStream:
    """Prompts in a shuffled order without end.

    The stream itself has no state: `draw` takes a position and returns the next one, a small JSON object that belongs
    in the checkpoint. The order of an epoch follows from seed, epoch and the prompts' identities alone, the same on
    every machine and for any order of the file.

    >>> from attnrl.types import as_ids
    >>> stream = PromptStream([Prompt(uid, as_ids([1]), ()) for uid in "abc"], seed=0)
    >>> first, position = stream.draw({}, 2)
    >>> rest, _ = stream.draw(position, 1)
    >>> sorted(prompt.uid for prompt in first + rest)
    ['a', 'b', 'c']
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts = {prompt.uid: prompt for prompt in prompts}
        if not prompts:
            raise DataError("the prompt stream has no prompts; every row was dropped, or the data set is empty")
        if len(self._prompts) != len(prompts):
            raise DataError(
                f"{len(prompts) - len(self._prompts)} prompts repeat another one's problem; "
                "load them with render_prompts(unique=True), which keeps one of each"
            )
        self.seed = seed
        self.longest = max(len(prompt.ids) for prompt in prompts)
        self.fingerprint = content_hash(*sorted(self._prompts))
        self._order: tuple[int, list[str]] = (-1, [])  # the last epoch's order, kept because it is asked for often

    def __len__(self) -> int:
        return len(self._prompts)

    def draw(self, position: dict[str, Any], n: int) -> tuple[list[Prompt], dict[str, Any]]:
        """The next n prompts after a position, and the position after them; `{}` is the start.

        No prompt comes twice in one draw unless n exceeds their number: where a draw runs into the next epoch, prompts
        it already holds are put off and lead the next draw. Each epoch still gives every prompt exactly once.
        """
        if n < 0:
            raise ValueError(f"cannot draw {n} prompts")
        epoch, offset, waiting = self._read(position)
        drawn, put_off = waiting[:n], waiting[n:]
        held = set(drawn) if n <= len(self) else set()  # a draw beyond one epoch must repeat
        while len(drawn) < n:
            order = self._epoch(epoch)
            if offset == len(order):
                assert not put_off, "a draw of at most one epoch never runs into a third"
                epoch, offset = epoch + 1, 0
                continue
            uid = order[offset]
            offset += 1
            if uid in held:
                put_off.append(uid)
                continue
            drawn.append(uid)
            if n <= len(self):
                held.add(uid)
        after = {"data": self.fingerprint, "seed": self.seed, "epoch": epoch, "offset": offset, "put_off": put_off}
        return [self._prompts[uid] for uid in drawn], after

    def _read(self, position: dict[str, Any]) -> tuple[int, int, list[str]]:
        if not position:
            return 0, 0, []
        if position["data"] != self.fingerprint:
            raise DataError(
                f"the checkpoint's position belongs to another data set (fingerprint {position['data']}, this one has "
                f"{self.fingerprint}); resume with the data, limits and filters of the run, or start a new run"
            )
        if position["seed"] != self.seed:
            raise DataError(f"the checkpoint's position was drawn with seed {position['seed']}, not {self.seed}")
        return position["epoch"], position["offset"], list(position["put_off"])

    def _epoch(self, epoch: int) -> list[str]:
        """The order of an epoch: by a keyed hash, since generators' shuffles change between library versions."""
        if self._order[0] != epoch:
            key = f"{self.seed}/{epoch}/".encode()
            self._order = (epoch, sorted(self._prompts, key=lambda uid: hashlib.sha256(key + uid.encode()).digest()))
        return self._order[1]
