"""Treadle as it is beside Treadle at another revision, in turns: what a change costs.

usage: python bench/against.py REVISION [workload ...] [--rounds 9] [--threads 1]
                               [--clock process_time] [--target native] [--patience 0]

ratio   this checkout over the revision: the median of the rounds' ratios, and its quartiles
first   seconds from building the model to the first step's result, with empty caches, the same way

REVISION is one of git's, or a folder that has the other's src/.
With one thread and its processor time (the default) a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from turns import Patience, Ratio, Worker, take_turns, use_threads

from models import FOR_GPUS, WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
TURN = 0.3  # seconds


class Checkout(Worker):
    """A worker whose Treadle is that of a folder."""

    def __init__(self, name: str, source: Path, environment: dict[str, str]):
        super().__init__("peers", "treadle", {**environment, "PYTHONPATH": str(source / "src")})
        self.name = name


def compare(workload: str, other: Path, given: argparse.Namespace) -> tuple[Ratio, list[float]]:
    """The ratio of steps, and each side's seconds to the first step."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        values = folder / "values.npz"
        np.savez(values, **WORKLOADS[workload].make().init(0))  # type: ignore[arg-type]
        task = {"workload": workload, "values": str(values)}
        workers, first = [], []
        for name, source in (("this", ROOT), ("other", other)):
            environment = {**use_threads(given.threads), "TREADLE_CACHE": "off"}
            if given.target:
                environment["TREADLE_TARGET"] = given.target
            workers.append(Checkout(name, source, environment))
            stack.callback(workers[-1].close)
            answer = workers[-1].ask("build", task=task, memory=False)
            first.append(answer["first_s"])
        turns = take_turns(workers, given.rounds, TURN, Patience(given.patience), given.clock)
        return Ratio.of(turns.ms["this"], turns.ms["other"]), first


@contextmanager
def source_of(revision: str) -> Iterator[Path]:
    """A folder with the source of a revision; one that is a folder is that."""
    if (Path(revision) / "src").is_dir():
        yield Path(revision).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        git: list[Any] = ["git", "-C", ROOT, "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", other, revision], check=True)
        try:
            yield other
        finally:
            subprocess.run([*git, "remove", "--force", other], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision")
    names = [n for n in WORKLOADS if n not in FOR_GPUS]
    parser.add_argument("workloads", nargs="*", default=[], metavar="workload")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", default="process_time", choices=("process_time", "perf_counter"))
    parser.add_argument("--target", default="")
    parser.add_argument("--patience", type=float, default=0.0)
    given = parser.parse_args()
    with source_of(given.revision) as other:
        for workload in given.workloads or names:
            ratio, first = compare(workload, other, given)
            shown = f"{ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f})"
            starts = f"first {first[0]:.2f} s over {first[1]:.2f} s"
            print(f"{workload:<12} {shown}   {starts}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    sys.exit(main())
