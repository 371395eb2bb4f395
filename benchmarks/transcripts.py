"""Step counts of real chains of thought under each segmenter, as JSON.

    ATTNRL_DATA=... python benchmarks/transcripts.py [--output FILE]

Reads transcripts/reasoning_transcripts.jsonl.gz and the tokenizer in tokenizers/ds_r1_distill_qwen under ATTNRL_DATA.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from attnrl.algo.branching import candidates
from attnrl.algo.steps import blank_lines, lines, sentences
from attnrl.data.texts import TokenTexts
from attnrl.types import as_ids

SEGMENTERS = {"blank_lines": blank_lines, "lines": lines, "sentences": sentences}


def summary(values: Sequence[int]) -> dict[str, float]:
    """Minimum, median, mean, 90th percentile and maximum."""
    a = np.asarray(values)
    return {
        "min": int(a.min()),
        "median": float(np.median(a)),
        "mean": round(float(a.mean()), 1),
        "p90": round(float(np.quantile(a, 0.9)), 1),
        "max": int(a.max()),
    }


def measure(data: Path) -> dict[str, Any]:
    """The distribution of steps, tokens per step and branch points over all transcripts."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizers/ds_r1_distill_qwen/tokenizer.json"))
    with gzip.open(data / "transcripts/reasoning_transcripts.jsonl.gz", "rt", encoding="utf-8") as file:
        responses = [json.loads(line)["response"] for line in file]
    texts_of = TokenTexts(tokenizer)
    ids = [as_ids(e.ids) for e in tokenizer.encode_batch(responses, add_special_tokens=False)]
    texts = [texts_of(row) for row in ids]
    result: dict[str, Any] = {
        "responses": len(responses),
        "tokens": summary([len(row) for row in ids]),
        "with_think_end": sum("</think>" in r for r in responses),
    }
    for name, segmenter in SEGMENTERS.items():
        steps = [segmenter(t) for t in texts]
        result[name] = {
            "lossless": sum(
                "".join(tokenizer.decode(row[s.start : s.stop].tolist(), skip_special_tokens=False) for s in cut)
                == text
                for row, cut, text in zip(ids, steps, responses, strict=True)
            ),
            "steps": summary([len(cut) for cut in steps]),
            "thinking_steps": summary([sum(s.thinking for s in cut) for cut in steps]),
            "tokens_per_step": summary([s.tokens for cut in steps for s in cut]),
            "one_step_responses": sum(len(cut) == 1 for cut in steps),
            "two_branch_points": sum(len(candidates(cut)) >= 2 for cut in steps),
        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write as well")
    options = parser.parse_args()
    if not os.environ.get("ATTNRL_DATA"):
        print("ATTNRL_DATA is not set: it names the folder of transcripts and tokenizers", file=sys.stderr)
        return 2
    report = json.dumps(measure(Path(os.environ["ATTNRL_DATA"])), indent=1)
    print(report)
    if options.output:
        options.output.write_text(report + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
