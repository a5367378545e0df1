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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

# Modules whose programs run a second time from the plan cache (tests/twice.py), each with a test
# that compiles some. They have a folder of their own: what is found there was compared when it was
# compiled. Calls are counted by module, and told at the end of a run.
TWICE = {
    "test_accumulator": "test_a_backward_of_your_own_is_summed_too",
    "test_cold_and_warm": "test_a_constant_keeps_its_dtype",
    "test_found": "test_nested_scans_read_their_own_rows",
    "test_index_checks": "test_arrays_of_every_kind",
    "test_onnx_cases": "test_some_cases_compiled_and_from_the_cache",
    "test_optimizers": "test_no_number_of_a_step_recompiles",
    "test_sizes_layers": "test_values_and_gradients[Linear]",
    "test_sizes_losses": "test_values_and_gradients[l1]",
    "test_sizes_metrics": "test_curves",
    "test_sizes_optimizers": "test_updates[sgd]",
    "test_step": "test_a_step_learns_and_tells",
}
RAN_TWICE: dict[str, int] = {}


@pytest.fixture(autouse=True, scope="module")
def twins(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What ran a second time in this module; None where nothing does."""
    name = request.module.__name__
    if name not in TWICE:
        yield None
        return
    from twice import Twins  # it imports Treadle, which reads the environment

    folder, found = tempfile.mkdtemp(prefix=PREFIX), Twins()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, folder)
        found.install(patch)
        yield found
    shutil.rmtree(folder, ignore_errors=True)
    RAN_TWICE[name] = RAN_TWICE.get(name, 0) + found.calls


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, calls in RAN_TWICE.items():
        terminalreporter.write_line(f"{name}: {calls} calls again from the plan cache")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and some ten thousand items stay to the end: no collection of garbage visits them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    if FOLDER is not None:
        shutil.rmtree(FOLDER, ignore_errors=True)
