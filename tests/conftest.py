"""What the whole suite runs under: a plan cache of its own, gone when the suite is.

A plan that an earlier version of the source left in the user's cache would hide what the source
does now, and tests have no business filling that cache. The environment is set while this file is
imported, before any test module is, so that subprocesses have it too.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# References compute in one thread: every worker has a processor of its own, and threads of PyTorch's
# and of NumPy's products that wait for one another there take it from the other worker.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# What a shell runs in the background ignores Ctrl-C, and so would the processes that tests start
# and then interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine may be as slow as it is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

VARIABLE, PREFIX = "TREADLE_CACHE", "treadle-tests-"


def _own_folder() -> str | None:
    """A new folder, or None in a worker of pytest-xdist, which has that of its controller."""
    if Path(os.environ.get(VARIABLE, "")).name.startswith(PREFIX):
        return None
    return tempfile.mkdtemp(prefix=PREFIX)


FOLDER = _own_folder()
if FOLDER is not None:
    os.environ[VARIABLE] = FOLDER
    os.environ.pop("TREADLE_CACHE_MB", None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and some ten thousand items stay to the end: no collection of garbage visits them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    if FOLDER is not None:
        shutil.rmtree(FOLDER, ignore_errors=True)
