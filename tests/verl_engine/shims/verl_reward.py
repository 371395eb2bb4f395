"""A reward that a random model earns about half of the time, and that can hold a run at a chosen place."""

import os
import time
from pathlib import Path

from attnrl.reward.declare import declare


@declare(truncated=True, here=True)
def many(attempts):
    """Right: more than three fifths of the tokens are of the made-up kind.

    ATTNRL_HOLD names a file: while it exists, grading waits once so many iterations are on record as it says of which
    run: "3 RUN_DIR"; a file of the same name with ".held" says that it does.
    """
    hold = Path(os.environ.get("ATTNRL_HOLD", "/nowhere"))
    while attempts and hold.exists():
        wanted, run = hold.read_text().split()
        recorded = Path(run, "metrics.jsonl")
        if not recorded.exists() or recorded.read_text().count("\n") < int(wanted):
            break
        hold.with_suffix(".held").touch()
        time.sleep(0.05)
    return [float(a.response.count("<x") > 0.6 * max(1, a.tokens)) for a in attempts]
