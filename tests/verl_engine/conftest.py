"""Where verl is installed, the test process is a driver of its engine, on the CPU."""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("verl") is not None:
    import tiny

    tiny.prepare()
