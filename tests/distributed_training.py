"""What every rank of a training test runs: `mpiexec -n 2 python distributed_training.py FOLDER …`.

Prints on rank 0 a digest of everything that must have the same bits, as `digest …`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import treadle as td
from treadle import losses, nn, optim
from treadle.distributed.environment import launched_rank
from treadle.train import folder as folders
from treadle.train.callback import Callback
from treadle.train.loggers import CSVLogger
from treadle.train.stopping import ReduceOnPlateau

ROWS, BATCH, SHARDS = 80, 16, 8


class Net(nn.Module):
    def __init__(self) -> None:
        self.fc1, self.norm = nn.Linear(6, 11), nn.BatchNorm1d(11)
        self.drop, self.fc2 = nn.Dropout(0.2), nn.Linear(11, 5)

    def forward(self, x: td.Tensor) -> td.Tensor:
        return self.fc2(self.drop(td.relu(self.norm(self.fc1(x)))))


def loss(model: Any, batch: Any) -> Any:
    return losses.cross_entropy(model(batch["x"]), batch["y"])


def data(rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((rows, 6), np.float32), rng.integers(0, 5, rows).astype(np.int32)
    return {"x": x, "y": y}


class Trouble(Callback):
    """What goes wrong on one rank, after a step."""

    def __init__(self, kind: str, rank: int, step: int):
        self.kind, self.rank, self.step = kind, rank, step

    def on_step_end(self, run: Any) -> None:
        if run.steps == self.step and launched_rank() == self.rank:
            self.happens(run)

    def happens(self, run: Any) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "raise":
            raise ValueError("row 7 is no number")
        elif self.kind == "hang":
            time.sleep(600)
        elif self.kind == "stop":
            run.stop("enough")
        elif self.kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif self.kind == "rate":
            run.step.lr_scale = 0.5
        elif self.kind == "full disk":
            folders.os.fsync = _full  # type: ignore[assignment]


def _full(handle: int) -> None:
    raise OSError(28, "No space left on device")


def compiled(local: bool, timeout: float, shard_parameters: bool = False) -> td.TrainStep:
    return td.compile_step(
        Net(),
        loss,
        optim.adamw(1e-2),
        {"x": td.Spec((BATCH, 6)), "y": td.Spec((BATCH,), td.int32)},
        device="cpu",
        seed=1,
        clip_norm=1.0,
        accumulate=2,
        parallel=td.DataParallel(
            shards=SHARDS, local=local, timeout=timeout, shard_parameters=shard_parameters
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=None)
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--sharded", action="store_true", help="shard the parameters")
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--trouble", nargs=3, default=None)
    given = parser.parse_args()
    step = compiled(given.local, given.timeout, given.sharded)
    callbacks: list[Callback] = [ReduceOnPlateau(patience=1, factor=0.5)]
    if given.trouble:
        kind, rank, at = given.trouble
        callbacks.append(Trouble(kind, int(rank), int(at)))
    loader = td.data.ArrayLoader(data(), BATCH, shuffle=True, seed=2, local=given.local)
    held_out = td.data.ArrayLoader(data(40), BATCH, local=given.local)
    trainer = td.Trainer(step, callbacks, [CSVLogger(given.folder / "log.csv")])
    history = trainer.fit(
        loader,
        steps=given.steps,
        validation=held_out,
        checkpoint=given.folder / "run",
        checkpoint_every=given.every,
        resume="auto",
    )
    state = step.state_dict()
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + np.ascontiguousarray(state[name]).tobytes())
    digest.update(history["loss"].tobytes())
    if launched_rank() == 0 and not given.local:  # else a validation is a mean of ranks' means
        digest.update(history["val/loss"].tobytes() + (given.folder / "log.csv").read_bytes())
    if launched_rank() == 0:
        print("digest", digest.hexdigest(), history.stopped)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
