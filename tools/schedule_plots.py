"""Draws docs/images/schedules.png: every schedule as rates over updates.

    python tools/schedule_plots.py

It needs matplotlib, which Treadle itself does not.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import treadle as td
from treadle import optim
from treadle.optim import Schedule

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "schedules.png"
UPDATES = 100
COLUMNS = 5

SCHEDULES = {
    "constant(1)": optim.constant(1.0),
    "linear(1, 0.1, 80)": optim.linear(1.0, 0.1, 80),
    "polynomial(1, 80, 2)": optim.polynomial(1.0, 80, 2.0),
    "exponential(1, 0.96)": optim.exponential(1.0, 0.96),
    "step_decay(1, 25, 0.4)": optim.step_decay(1.0, 25, 0.4),
    "multi_step(1, [20, 60], 0.4)": optim.multi_step(1.0, [20, 60], 0.4),
    "cosine(1, 80)": optim.cosine(1.0, 80),
    "warmup_cosine(1, 15, 80)": optim.warmup_cosine(1.0, 15, 80),
    "cosine_restarts(1, 14, 2)": optim.cosine_restarts(1.0, 14, 2),
    "one_cycle(1, 90)": optim.one_cycle(1.0, 90),
    "triangular(0.1, 1, 12)": optim.triangular(0.1, 1.0, 12),
    'cyclic(…, mode="triangular2")': optim.cyclic(0.1, 1.0, 12, mode="triangular2"),
    'cyclic(…, mode="exp_range")': optim.cyclic(0.1, 1.0, 12, mode="exp_range", gamma=0.98),
    "noam(64, 20, 30)": optim.noam(64, 20, 30.0),
    "join([linear, cosine], [20])": optim.join(
        [optim.linear(0.0, 1.0, 20), optim.cosine(1.0, 60, 0.1)], [20]
    ),
}


def rates(schedule: Schedule) -> np.ndarray:
    """The rates of all updates at once: a schedule is a function of tensors."""
    hyper = {k: td.tensor(v) for k, v in schedule.hyper.items()}
    counts = td.tensor(np.arange(UPDATES, dtype=np.float32))
    return np.broadcast_to(schedule.value(counts, hyper).numpy(), UPDATES)


def figure() -> Figure:
    rows = len(SCHEDULES) // COLUMNS
    drawn = Figure(figsize=(12, 2 * rows), layout="constrained")
    grid = drawn.subplots(rows, COLUMNS, sharex=True, sharey=True).ravel()
    for axes, (title, schedule) in zip(grid, SCHEDULES.items(), strict=True):
        axes.plot(rates(schedule), color="#00695c", linewidth=1.5)
        axes.set_title(title, fontsize=8, family="monospace")
        axes.set_ylim(-0.05, 1.1)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
    drawn.supxlabel("updates done", fontsize=9)
    drawn.supylabel("rate", fontsize=9)
    return drawn


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    figure().savefig(PICTURE, dpi=80)
