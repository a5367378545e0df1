"""What every rank of a test of native calls runs: `mpiexec -n 2 python distributed_calls.py`.

Prints how many native calls each step made, and what Python exchanged meanwhile. Then the last rank
never makes the next step's call, in the middle of the step.
"""

from __future__ import annotations

import time

import distributed_cases as cases
from treadle.distributed.launched import open_communicator
from treadle.distributed.mpi import MpiCommunicator
from treadle.runtime.cpu.threads import Pool

CALLS: list[str] = []


def counted(kind: type, name: str) -> None:
    made = getattr(kind, name)

    def call(*given: object) -> object:
        CALLS.append(name)
        return made(*given)

    setattr(kind, name, call)


def hang(*given: object) -> None:
    time.sleep(600)


def main() -> None:
    found = []
    step = cases.compiled("cnn")
    batches = list(cases.rows("images", 4))
    step(batches[0])  # the batch is compared at the first
    for name in ("run", "run_several"):
        counted(Pool, name)
    for name in ("all_to_all", "all_gather"):
        counted(MpiCommunicator, name)
    comm = open_communicator("auto", 60.0)
    for batch in batches[1:]:
        CALLS.clear()
        step(batch)
        found.append(f"{CALLS.count('run')} native of {CALLS}")
    print(f"rank {comm.rank}: {found}", flush=True)
    step._ranks.communicator.timeout = 2.0  # compiling takes as long as it does
    if comm.rank == comm.size - 1:
        Pool.run = hang  # type: ignore[method-assign,assignment]
    step(batches[0])


if __name__ == "__main__":
    main()
