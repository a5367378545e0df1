"""Programs some of whose results are constants, by name; what each returns, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import treadle as td
from treadle import nn, optim
from treadle.base import dtypes, trees
from treadle.base.dtypes import DType

X = np.array([1.5, -2.0, 0.25, 3.0], np.float32)
SPEC = td.Spec((4,))
Results = Mapping[str, np.ndarray]


def values_of(dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """Elements that differ, and whose bytes differ from those of their neighbours."""
    size = int(np.prod(shape, dtype=int))
    numbers = np.arange(size) % 2 if dtype.kind == "bool" else np.arange(size) * 7 + 3
    return numbers.astype(dtype.numpy).reshape(shape)


def constants(device: str) -> Results:
    """Every dtype that the device has, with axes, without, and with no element."""
    wide = device == "webgpu"  # which has nothing of 64 bits
    shapes = ((2, 3), (), (0, 2), (5,))
    found = {}
    for dtype in (d for d in dtypes.ALL if not wide or d.itemsize <= 4):
        arrays = [values_of(dtype, shape) for shape in shapes]
        function = td.compile(lambda x, a=arrays: [td.tensor(v) for v in a], SPEC, device=device)
        for shape, array in zip(shapes, function(X), strict=True):
            found[f"{dtype} {shape}"] = np.asarray(array)
    return found


def functions(device: str) -> Results:
    """Constants beside results that are computed, one twice, and gradients of what is linear."""
    weights = np.array([0.5, 2.0, -1.0, 4.0], np.float32)

    def several(x):
        line = td.linspace(0.0, 1.0, 5)
        return {"line": line, "again": line, "rows": line.reshape(1, 5), "sum": x.sum(), "x": x}

    def linear(x):
        return (x * td.tensor(weights)).sum()

    found = {
        "several": td.compile(several, SPEC, device=device)(X),
        "gradient": td.compile(td.grad(linear), SPEC, device=device)(X),
        "both": td.compile(td.value_and_grad(linear), SPEC, device=device)(X),
    }
    return flat(found)


def steps(device: str) -> Results:
    """Programs of a step: a forward, gradients of a linear loss, metrics and captures."""

    class Net(nn.Module):
        def __init__(self) -> None:
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            td.capture("halves", td.full((2, 2), 0.5))
            return self.fc(x)

    def loss(model, b):
        td.metric("rate", td.full((), 0.3))
        return model(b["x"]).sum()

    specs = {"x": td.Spec((3, 4))}
    batch = {"x": np.arange(12, dtype=np.float32).reshape(3, 4) / 8}
    step = td.compile_step(Net(), loss, optim.sgd(0.1), specs, device=device)
    line = step.attach(lambda model, b: td.linspace(0.0, 1.0, 5), specs)
    result = step(batch, captures=True)
    found = {
        "attach": line(batch),
        "gradients": step.gradients(batch),
        "loss": result.loss,
        "metrics": result.metrics,
        "captures": result.captures,
        "evaluated": step.evaluate(batch).metrics,
        "state": step.state_dict(),
    }
    return flat(found)


def flat(tree: Any) -> Results:
    leaves, _ = trees.flatten(tree)
    return {path: np.asarray(leaf) for path, leaf in zip(trees.paths(tree), leaves, strict=True)}


PROGRAMS: dict[str, Callable[[str], Results]] = {
    f.__name__: f for f in (constants, functions, steps)
}
