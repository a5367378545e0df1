"""What every rank of two does wrong, one after the other: each is an error on both of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle as td
from treadle import losses, nn, optim
from treadle.distributed.launched import open_communicator
from treadle.step.parallel import agree

comm = open_communicator("auto", 60.0)
first = comm.rank == 0
assert comm.size == 2


def loss(model: Any, batch: Any) -> Any:
    return losses.mse(model(batch["x"]), batch["y"])


def doubled(model: Any, batch: Any) -> Any:
    return loss(model, batch) * 2


def small(
    rows: int = 8, seed: int = 0, function: Any = loss, anomaly: bool = True, **parallel: Any
) -> td.TrainStep:
    return td.compile_step(
        nn.Linear(3, 2),
        function,
        optim.adamw(1e-2),
        {"x": td.Spec((rows, 3)), "y": td.Spec((rows, 2))},
        device="cpu",
        seed=seed,
        parallel=td.DataParallel(**{"shards": 4, "timeout": 20.0, **parallel}),
        options=td.CompileOptions(detect_anomaly=anomaly),
    )


def refused(call: Callable[[], object], told: str) -> None:
    with pytest.raises(td.TreadleError, match=told):
        call()


def batch(rows: int = 8, start: float = 0.0) -> dict[str, np.ndarray]:
    x = np.linspace(start, 1, rows * 3, dtype=np.float32).reshape(rows, 3)
    return {"x": x, "y": np.zeros((rows, 2), np.float32)}


def main() -> None:
    refused(lambda: small(seed=comm.rank), "ranks 0 and 1 differ in their seed: 0 and 1")
    refused(lambda: small(rows=8 if first else 16), r"differ in their batch: x float32\[8,3\]")
    refused(
        lambda: small(function=loss if first else doubled),
        "ranks 0 and 1 differ in their program of a shard",
    )
    refused(
        lambda: small(shards=4 if first else 8), "ranks 0 and 1 differ in their parallel: .*shards"
    )
    own = agree.__version__
    agree.__version__ = own if first else "0.0.1"
    refused(small, f"ranks 0 and 1 differ in their version of Treadle: {own} and 0.0.1")
    agree.__version__ = own
    refused(lambda: small(rows=6), "6 rows")  # which four shards cannot share
    refused(lambda: small()(batch(start=comm.rank)), "were given different batches")
    step = small()
    step(batch())
    before = step.state_dict()
    wrong = batch() if first else {"x": batch()["x"]}
    refused(lambda: step(wrong), "rank 1 refused, so that nothing" if first else "y is missing")
    bad = batch()
    bad["x"][7] = np.nan
    refused(lambda: step(bad), "shard 3, on rank 1, is nan")
    local = small(local=True)
    rows = {n: a[4 * comm.rank : 4 * comm.rank + 4] for n, a in batch().items()}
    assert local(rows).loss == small()(batch()).loss
    if not first:
        rows["x"][3] = np.nan
    refused(lambda: local(rows), "shard 3, on rank 1, is nan")
    for name, value in step.state_dict().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    not_a_number_in_training(rows)
    a_full_disk(step)
    print("refused as expected")


def not_a_number_in_training(rows: dict[str, np.ndarray]) -> None:
    """A trainer ends before it writes a checkpoint: of one rank's NaN, every rank's error."""
    folder = Path(sys.argv[1], "run")
    step = small(local=True, anomaly=False)
    fine = {n: a[:4] for n, a in batch().items()}
    trainer = td.Trainer(step, progress=False)
    given = {"epochs": 1, "checkpoint": folder, "checkpoint_every": 1}
    refused(lambda: trainer.fit([fine, rows], **given), "loss is nan")
    assert [p.name[:6] for p in folder.iterdir() if p.is_dir()] == ["000001"]


def a_full_disk(step: td.TrainStep) -> None:
    """What the first rank cannot write is an error on both, and nothing is left of it."""
    path, synced = Path(sys.argv[1], "step.safetensors"), os.fsync
    if first:
        os.fsync = full  # type: ignore[assignment]
    refused(lambda: step.save(path), "No space left" if first else "rank 0 refused.*No space left")
    os.fsync = synced
    assert not [p for p in path.parent.iterdir() if "safetensors" in p.name]


def full(handle: int) -> None:
    raise OSError(28, "No space left on device")


def wait_in_vain() -> None:
    """The second rank never compiles: the first gives up after a second, and ends the job."""
    if not first:
        time.sleep(300)
        return
    try:
        small(timeout=1.0)
    except td.DistributedError as error:
        print(error, flush=True)


if __name__ == "__main__":
    wait_in_vain() if sys.argv[1:] == ["late"] else main()
