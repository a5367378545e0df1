"""Accumulation, and a run that is cut off and goes on with the same bits.

python examples/accumulate_and_resume.py
treadle train examples/accumulate_and_resume.py --set folder=run --set steps=40
treadle train examples/accumulate_and_resume.py --set folder=run --set steps=80 --resume
"""

import tempfile
from pathlib import Path

import numpy as np

import treadle as td
from treadle import callbacks, data, losses, nn, optim


def loss(model, batch):
    return losses.cross_entropy(model(batch["x"]), batch["y"])


def make(accumulate):
    """A step whose updates are made of several batches, and its data."""
    images, labels = data.load_digits()
    arrays = {"x": images.reshape(-1, 64), "y": labels}
    batches = data.ArrayLoader(arrays, 32, shuffle=True, seed=1)
    model = nn.Sequential(nn.Linear(64, 96), nn.Dropout(0.1), nn.Tanh(), nn.Linear(96, 10))
    step = td.compile_step(
        model, loss, optim.adamw(2e-3), next(iter(batches)), device="cpu", accumulate=accumulate
    )
    return step, batches


def fit(folder, steps, accumulate=4, resume=None, cut_off=None):
    def fail(run):
        if run.batches == cut_off:
            raise ConnectionError("the power is gone")

    step, batches = make(accumulate)
    trainer = td.Trainer(
        step,
        [callbacks.Lambda(on_step_end=fail)],
        [td.loggers.CSVLogger(Path(folder) / "log.csv")],
    )
    history = trainer.fit(
        batches,
        steps=steps,
        checkpoint=Path(folder) / "checkpoints",
        checkpoint_every=10,
        resume=resume,
    )
    return step, history


def train(steps: int = 80, accumulate: int = 4, folder: str = "", resume: str | None = None):
    if folder:  # from the command line
        return fit(folder, steps, accumulate, resume)
    place = Path(tempfile.mkdtemp())
    whole, _ = fit(place / "whole", steps, accumulate)
    middle = accumulate * (steps // 2) + accumulate // 2  # inside a window of batches
    try:
        fit(place / "cut", steps, accumulate, cut_off=middle)
    except td.CallbackError as error:
        print(error)
        print(*error.__notes__)
    again, history = fit(place / "cut", steps, accumulate, resume="auto")

    same = all(np.array_equal(again.params[n], value) for n, value in whole.params.items())
    logs = [(place / run / "log.csv").read_bytes() for run in ("whole", "cut")]
    print(f"the same bits: {same}; the same log: {logs[0] == logs[1]}; {len(history)} updates")
    return same and logs[0] == logs[1]


if __name__ == "__main__":
    train()
