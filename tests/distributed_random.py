"""Random training programs on every rank: `mpiexec -n 2 python distributed_random.py FIRST COUNT`.

Each program is that of a shard; the batch is several of its batches, one after the other. What all
ranks give together is compared with what each gives by itself.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np

import treadle as td
from distributed_cases import digest
from treadle.distributed.launched import open_communicator
from treadle.fuzz.generate import generate
from treadle.fuzz.program import TRAINING, Program
from treadle.fuzz.source import NAMESPACE, defined

SHARDS = 4


def batches_of(program: Program, count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(program.seed)
    found = []
    for _ in range(count):
        shards = [program.arrays(rng) for _ in range(SHARDS)]
        found.append({n: _stacked([s[n] for s in shards]) for n in shards[0]})
    return found


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays[0].ndim else arrays[0]


def trained(program: Program, **parallel: Any) -> str:
    training = program.training
    assert training is not None
    batches = batches_of(program, training.updates)
    step = td.compile_step(
        defined(program)(),
        lambda model, batch: model(**batch),
        eval(training.optimizer, dict(NAMESPACE)),
        batches[0],
        device="cpu",
        clip_norm=training.clip_norm,
        precision=training.precision,
        parallel=td.DataParallel(shards=SHARDS, timeout=60.0, **parallel),
    )
    told = [(out.loss, out.grad_norm) for out in map(step, batches)]
    return digest(step.state_dict(), told)


def compared(program: Program, shard_parameters: bool) -> str:
    """What became of a program: the same, other bits, or why it cannot be cut into shards."""
    for given in ({"shard_parameters": shard_parameters}, {"shard_optimizer": False}):
        try:
            alone = trained(program, transport="self", **given)
        except td.TreadleError as error:
            if "shard_optimizer=False" in str(error):
                continue
            return f"refused: {error}"
        return "same" if trained(program, **given) == alone else "OTHER BITS"
    return "refused"


def main() -> None:
    warnings.simplefilter("ignore")
    first, count = map(int, sys.argv[1:])
    comm = open_communicator("auto", 60.0)
    numbers = range(first, first + count)
    found = {i: compared(generate(7, i, mode=TRAINING), i % 2 == 1) for i in numbers}
    wrong = {i: told for i, told in found.items() if told == "OTHER BITS"}
    refused = [told for told in found.values() if told.startswith("refused")]
    assert not wrong, f"rank {comm.rank}: {wrong}"
    if comm.rank == 0:
        print(f"{sum(t == 'same' for t in found.values())} same, {len(refused)} refused")
        for told in sorted({t.split("[")[0] for t in refused}):
            print(told[:150])


if __name__ == "__main__":
    main()
