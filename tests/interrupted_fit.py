"""Runs of a Trainer that are killed at chosen lines: what tests/test_resume.py starts.

    python interrupted_fit.py sweep FOLDER SEED COUNT [several]

makes a whole run, of one step or of several steps and a forward that draws, then COUNT runs in
children that are killed at a random line and go on by themselves until they are through, and
compares everything that each leaves with the whole run.

    python interrupted_fit.py fit FOLDER DEVICE SECONDS

makes one run that waits at every step, for tests that send signals.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import treadle as td
from treadle import data, losses, metrics, nn, optim
from treadle.train import folder as writer

ROWS, BATCH, ACCUMULATE, EPOCHS = 44, 4, 2, 3  # 11 batches: a window goes on in the next epoch
WATCHED = ("/treadle/train/", "/treadle/data/loaders.py", "/treadle/data/prefetch.py")
SESSION = ("runtime/session.py", "step/train_step.py")
group = metrics.Group({"accuracy": metrics.Accuracy()})


class Net(nn.Module):
    """Everything that a state is made of: parameters, running statistics, random numbers."""

    def __init__(self):
        self.fc1, self.norm, self.fc2 = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return self.fc2(self.dropout(td.tanh(self.norm(self.fc1(x)))))


def loss(model, batch):
    scores = model(batch["x"])
    group.capture(scores, batch["y"])
    td.metric("rows", batch["number"].astype(td.float32).mean())  # which rows it was
    return losses.cross_entropy(scores, batch["y"])


def arrays(rows: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "y": (x[:, 0] > 0).astype(np.int32), "number": np.arange(rows, dtype=np.int32)}


def make_step(device: str = "oracle") -> td.TrainStep:
    schedule = optim.warmup_cosine(peak=0.05, warmup=2, steps=20)
    example = {k: v[:BATCH] for k, v in arrays(ROWS, 0).items()}
    return td.compile_step(
        Net(), loss, optim.adamw(schedule), example, accumulate=ACCUMULATE, seed=3, device=device
    )


class Drawing:
    """Two steps on one set of parameters, one of which learns from what a forward draws."""

    def __init__(self) -> None:
        example = {k: v[:BATCH] for k, v in arrays(ROWS, 0).items()}
        options = {"seed": 3, "device": "oracle"}
        first = td.compile_step(
            Net(), loss, optim.only("fc1.*", optim.adamw(0.05)), example, **options
        )
        rest = optim.only(["fc2.*", "norm.*"], optim.sgd(0.1, momentum=0.9))
        second = td.compile_step(Net(), loss, rest, example, share=first, **options)
        self.steps = {"first": first, "second": second}
        self.draw = first.attach(lambda m, x: x + td.random.normal(x.shape), example["x"])

    def __call__(self, steps, batch):
        """The second one makes two updates for each of the first."""
        out = {"first": steps["first"](batch), "second": steps["second"](batch)}
        noisy = batch | {"x": self.draw(batch["x"])}
        return out | {"again": steps["second"](noisy), "mean": float(noisy["x"].mean())}


class Slow(td.callbacks.Callback):
    def __init__(self, seconds: float):
        self.seconds = seconds

    def on_step_end(self, run):
        print("step", run.batches, flush=True)
        time.sleep(self.seconds)


def fit(step: td.TrainStep | Drawing, folder: Path, seconds: float = 0.0) -> td.History:
    """A run with all that remembers something, started or gone on with."""
    several = isinstance(step, Drawing)
    loader = data.ArrayLoader(arrays(ROWS, 0), BATCH, shuffle=True, seed=5)
    held_out = data.ArrayLoader(arrays(13, 1), 5)
    callbacks = [
        td.callbacks.EMA(0.9, every=2),
        td.callbacks.ReduceOnPlateau(patience=0, factor=0.7),
        td.callbacks.EarlyStopping({"val/loss": "min", "val/accuracy": "max"}, patience=9),
        td.callbacks.GradientMonitor(every=4),
        *([Slow(seconds)] if seconds else []),
    ]
    loggers = [
        td.loggers.CSVLogger(folder / "log.csv"),
        td.loggers.JSONLLogger(folder / "log.jsonl"),
    ]
    trainer = td.Trainer(
        step.steps if several else step,
        callbacks,
        loggers,
        training_step=step if several else None,
        metrics=group,
        progress=False,
    )
    return trainer.fit(
        data.Prefetch(loader, depth=2) if seconds else loader,
        epochs=EPOCHS,
        validation=held_out,
        validate_every=3,
        checkpoint=folder / "checkpoints",
        checkpoint_every=2,
        resume="auto",
    )


class Killer:
    """Counts lines of the watched files, and ends the process at one of them."""

    def __init__(self, at: int | None):
        self.at, self.count = at, 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        is_watched = any(w in name for w in WATCHED) or name.endswith(SESSION)
        return self.line if is_watched else None

    def line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.line


def save_final(step: td.TrainStep | Drawing, folder: Path) -> None:
    named = step.steps if isinstance(step, Drawing) else {"final": step}
    for name, own in named.items():
        own.save(folder / f"{name}.safetensors")


def in_child(step: td.TrainStep | Drawing, folder: Path, kill_at: int | None) -> int:
    """A run in a process that may be killed: the lines it came to, or -1."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        killer = Killer(kill_at)
        sys.settrace(killer)
        fit(step, folder)
        sys.settrace(None)
        save_final(step, folder)
        os.write(writes, str(killer.count).encode())
        os._exit(0)
    os.close(writes)
    said = os.read(reads, 20)
    os.close(reads)
    status = os.waitpid(child, 0)[1]
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert was_killed or (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0), status
    return -1 if was_killed else int(said)


def left(folder: Path) -> dict[str, bytes]:
    """Everything a run leaves that must not depend on how often it was killed."""
    files = [*folder.glob("*.safetensors"), folder / "log.csv", folder / "log.jsonl"]
    found = {file.name: file.read_bytes() for file in files}
    reader = td.CheckpointManager(folder / "checkpoints", read_only=True)
    latest = reader.latest()
    assert latest is not None
    assert not [p for p in reader.folder.iterdir() if p.name.startswith((".w", ".d"))]
    history = td.train.history.HistoryFile(reader.folder / "history.jsonl").read(10**9)
    found["history"] = repr(list(history.rows())).encode()
    found["checkpoint"] = repr((latest.extra, latest.metrics)).encode()
    found["averages"] = b"".join(a.tobytes() for a in latest.arrays().values())
    return found


def sweep(folder: Path, seed: int, count: int, several: bool = False) -> None:
    writer.CHUNK = 4096
    step = Drawing() if several else make_step()
    whole = folder / "whole"
    lines = in_child(step, whole, None)
    expected = left(whole)
    chosen = random.Random(seed)
    kills = 0
    for _ in range(count):
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        while in_child(step, work, chosen.randrange(1, lines + 1)) == -1:
            kills += 1
        found = left(work)
        wrong = [name for name, content in expected.items() if found[name] != content]
        assert not wrong, wrong
    assert kills, "no run was killed"
    print(f"{lines} lines, {count} runs, {kills} kills")


if __name__ == "__main__":
    command, place = sys.argv[1], Path(sys.argv[2])
    if command == "sweep":
        sweep(place, int(sys.argv[3]), int(sys.argv[4]), "several" in sys.argv)
    else:
        made = make_step(sys.argv[3])
        history = fit(made, place, float(sys.argv[4]))
        made.save(place / "final.safetensors")
        print("done", len(history), flush=True)
