import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("attnrl", deadline=None)  # a busy machine is no fault of the code
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "attnrl"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what a test starts would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent))  # tests/fakes.py


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real benchmarks, training sets and transcripts; tests that need it skip where it is not set."""
    if not os.environ.get("ATTNRL_DATA"):
        pytest.skip("ATTNRL_DATA is not set: this test reads the real data sets")
    return Path(os.environ["ATTNRL_DATA"])
