"""Programs that are killed at chosen lines: what tests/test_checkpoints.py starts.

    python interrupted.py train FOLDER RESULT DEVICE [KILL_AT]

goes on from the checkpoints in FOLDER and writes the final state to RESULT. With KILL_AT it sends
itself SIGKILL at that line, counted over the lines of the writer, the session and the step since
training began. Every line's module is listed in RESULT.lines.

    python interrupted.py save FOLDER

saves a second checkpoint in a child that is killed, once for every line of the writer, and checks
each time that the first or the second is there, complete.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import treadle as td
from treadle import losses, nn, optim
from treadle.train import folder as writer

EPOCH, BATCHES, ACCUMULATE, EVERY = 7, 24, 3, 2  # no two of them have a common divisor
WRITER = ("train/folder.py", "train/checkpoint.py", "shutil.py")
TRAINING = (*WRITER[:2], "runtime/session.py", "step/train_step.py")


class Net(nn.Module):
    """Everything that a state is made of: parameters, running statistics, random numbers."""

    def __init__(self):
        self.fc1, self.norm, self.fc2 = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return self.fc2(self.dropout(td.tanh(self.norm(self.fc1(x)))))


def loss(model, batch):
    scores = model(batch["x"])
    td.metric("largest", scores.max(), 1.0)
    return losses.cross_entropy(scores, batch["y"])


def batch(position: int) -> dict[str, np.ndarray]:
    """The batch at a position of the data, which is shuffled anew in every epoch."""
    epoch, place = divmod(position, EPOCH)
    rng = np.random.default_rng([epoch, place])
    return {"x": rng.normal(size=(8, 6)).astype(np.float32), "y": rng.integers(0, 3, 8)}


def make(device: str) -> td.TrainStep:
    schedule = optim.warmup_cosine(peak=0.05, warmup=2, steps=BATCHES)
    return td.compile_step(
        Net(),
        loss,
        optim.adamw(schedule),
        {"x": td.Spec((8, 6)), "y": td.Spec((8,), td.int32)},
        device=device,
        accumulate=ACCUMULATE,
        clip_norm=1.0,
        seed=3,
    )


class Killer:
    """Counts lines of the watched files, and ends the process at one of them."""

    def __init__(self, at: int | None, files: tuple[str, ...]):
        self.at, self.files, self.lines = at, files, []

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        return self.line if frame.f_code.co_filename.endswith(self.files) else None

    def line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.lines.append(Path(frame.f_code.co_filename).stem)
            if len(self.lines) == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.line


def train(folder: Path, result: Path, device: str, kill_at: int | None) -> None:
    writer.CHUNK = 512  # so that files are written in several pieces
    step = make(device)
    killer = Killer(kill_at, TRAINING)
    sys.settrace(killer)
    with td.CheckpointManager(folder, keep_last=2) as checkpoints:
        found = checkpoints.restore(step, "auto")
        for position in range(found.extra["position"] if found else 0, BATCHES):
            out = step(batch(position))
            if (position + 1) % EVERY == 0:
                checkpoints.save(step, metrics={"loss": out.loss}, extra={"position": position + 1})
    sys.settrace(None)
    step.save(result)
    result.with_suffix(".lines").write_text("\n".join(killer.lines))


def _in_child(folder: Path, step: td.TrainStep, kill_at: int | None) -> int:
    """Open the folder and save, in a process that may be killed; lines it came to, or -1."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        killer = Killer(kill_at, WRITER)
        sys.settrace(killer)
        td.CheckpointManager(folder, keep_last=1, keep_best=0).save(step)
        sys.settrace(None)
        os.write(writes, str(len(killer.lines)).encode())
        os._exit(0)
    os.close(writes)
    said = os.read(reads, 20)
    os.close(reads)
    status = os.waitpid(child, 0)[1]
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert was_killed or (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0), status
    return -1 if was_killed else int(said)


def _is(state: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return state.keys() == other.keys() and all(np.array_equal(state[n], other[n]) for n in state)


def save_at_every_line(folder: Path) -> None:
    writer.CHUNK = 4096
    step, reader = make("oracle"), make("oracle")
    start = folder / "start"
    step(batch(0))
    with td.CheckpointManager(start, keep_last=1, keep_best=0) as checkpoints:
        checkpoints.save(step)
    (start / ".writing-000002-step-0").mkdir()  # of a writer that was killed before
    (start / ".writing-000002-step-0" / "step.safetensors").write_bytes(b"half")
    first = step.state_dict()
    step(batch(1))
    second = step.state_dict()

    work, survived = folder / "work", {"first": 0, "second": 0}
    shutil.copytree(start, work)
    lines = _in_child(work, step, None)
    for line in range(1, lines + 1):
        shutil.rmtree(work)
        shutil.copytree(start, work)
        assert _in_child(work, step, line) == -1
        with td.CheckpointManager(work, keep_last=1, keep_best=0) as checkpoints:
            assert checkpoints.restore(reader) is not None
            state = reader.state_dict()
            assert _is(state, first) or _is(state, second), line
            survived["first" if _is(state, first) else "second"] += 1
            assert not [p for p in work.iterdir() if p.name.startswith((".w", ".d"))], line
            entries = [p for p in work.iterdir() if p.is_dir()]
            assert len(entries) == len(checkpoints.list()), line  # none is partly there
            if line % 10 == 0:
                checkpoints.save(reader)
                assert len(checkpoints.list()) == 1, line
    assert all(survived.values()), survived
    print(lines, survived)


if __name__ == "__main__":
    command, path = sys.argv[1], Path(sys.argv[2])
    if command == "save":
        save_at_every_line(path)
    else:
        at = int(sys.argv[5]) if len(sys.argv) > 5 else None
        train(path, Path(sys.argv[3]), sys.argv[4], at)
