"""The reward of `iteration.py`, in a file of its own: the process that grades imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from attnrl.reward import declare
from attnrl.types import Attempt


@declare(truncated=True)
def parity(attempts: Sequence[Attempt]) -> list[float]:
    """1 or 0 by the hash of the response: outcomes that differ between branches, whatever the model."""
    return [float(hashlib.sha256(a.response.encode()).digest()[0] & 1) for a in attempts]
