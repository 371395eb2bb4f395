"""Puts the tiny models of tests/scoring on the path, and keeps torch to one thread: the tensors are tiny."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scoring"))
torch.set_num_threads(1)
