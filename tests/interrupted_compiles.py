"""First compiles that are interrupted at many moments: what tests/test_interrupted_compiles.py starts.

    python interrupted_compiles.py COUNT

Each is in a child of its own, which has compiled nothing before. After the interrupt it compiles
again, and must give what a compile that is not interrupted gives. A line says how many were
interrupted.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import numpy as np

import treadle as td
from treadle import losses, nn, optim


class Net(nn.Module):
    def __init__(self) -> None:
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(td.tanh(self.first(x)))


BATCH = {"x": np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 8), "y": np.arange(6) % 4}


def first_loss() -> float:
    step = td.compile_step(
        Net(), lambda m, b: losses.cross_entropy(m(b["x"]), b["y"]), optim.adam(0.1), BATCH,
        device="cpu",
    )  # fmt: skip
    step(BATCH)
    return step(BATCH).loss


def in_child(work: Callable[[], str]) -> str:
    """What a child says; an error if it ends otherwise than by itself."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        os.write(writes, work().encode())
        sys.stdout.flush()
        sys.exit(0)  # with all that Python does at its end
    os.close(writes)
    said = os.read(reads, 1000).decode()
    os.close(reads)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"a child ended with {status} and said {said!r}"
    return said


def timed() -> str:
    start = time.perf_counter()
    loss = first_loss()
    return f"{time.perf_counter() - start} {loss!r}"


def interrupted_after(seconds: float) -> str:
    """Whether a compile was interrupted, and the loss of the next one."""
    was_interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        first_loss()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    loss = first_loss()
    assert gc.isenabled(), "the collection of garbage is off"
    return f"{int(was_interrupted)} {loss!r}"


def main(count: int) -> None:
    taken, expected = in_child(timed).split()
    interrupted = 0
    for i in range(count):
        said = in_child(lambda i=i: interrupted_after(float(taken) * (i + 0.5) / count))
        was_interrupted, loss = said.split()
        interrupted += int(was_interrupted)
        assert loss == expected, (i, loss, expected)
    print(interrupted)


if __name__ == "__main__":
    main(int(sys.argv[1]))
