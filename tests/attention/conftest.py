"""Puts this folder and the tiny models of tests/scoring on the path; one thread for torch: the tensors are tiny."""

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "scoring")]
torch.set_num_threads(1)
