"""Who trains the entries of the zoo: Treadle, and PyTorch eager, compiled or with channels last."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from families import ZOO
from families.entry import Arrays, Entry
from peers import BETAS, DECAY, EPSILON, RATE
from turns import Contender, Running

import treadle as td
from treadle import optim

Start = Callable[[Entry, str, Arrays], Running]  # (entry, device, first values)


def specs(batch: Arrays) -> dict[str, td.Spec]:
    dtypes = {"float32": td.float32, "int32": td.int32}
    return {n: td.Spec(a.shape, dtypes[a.dtype.name]) for n, a in batch.items()}


def first_values(name: str, device: str) -> Arrays:
    """What all contenders begin with."""
    side = importlib.import_module("families.with_treadle")
    entry = ZOO[name]
    return dict(entry.make(side, **entry.sizes(device)).init(0))


def treadle_step(entry: Entry, device: str) -> td.TrainStep:
    side = importlib.import_module("families.with_treadle")
    return td.compile_step(
        entry.make(side, **entry.sizes(device)),
        lambda model, batch: model(batch),
        optim.adamw(RATE, BETAS, EPSILON, DECAY),
        specs(entry.arrays(device)),
        device=device,
        precision=entry.precision(device),
        seed=0,
    )


def treadle_start(entry: Entry, device: str, values: Arrays) -> Running:
    """Its own first values are the given ones: they came from the same seed."""
    step, batch = treadle_step(entry, device), on_device(entry, device)
    last: list[Any] = [None]

    def run() -> None:
        last[0] = step(batch)

    return Running(
        run,
        lambda: last[0].loss,
        lambda: float(last[0].loss),
        (lambda: step.report.peak_bytes / 2**20) if device == "cuda" else None,
    )


def on_device(entry: Entry, device: str) -> dict[str, Any]:
    """Arrays on the CPU, PyTorch's tensors on a GPU, so that no step copies its batch there."""
    return moved(entry.arrays(device), device)


def moved(arrays: Arrays, device: str) -> dict[str, Any]:
    if device == "cpu" or importlib.util.find_spec("torch") is None:
        return dict(arrays)
    import torch

    batch = {n: torch.tensor(a, device=device) for n, a in arrays.items()}
    torch.cuda.synchronize()
    return batch


def torch_start(mode: str, entry: Entry, device: str, values: Arrays) -> Running:
    import torch

    is_gpu = device == "cuda"
    side = importlib.import_module("families.with_torch")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_default_device(device)
    torch.backends.cudnn.benchmark = True
    before = torch.cuda.memory_allocated() if is_gpu else 0
    model = entry.make(side, **entry.sizes(device))
    found = model.load_state_dict({n: torch.tensor(v) for n, v in values.items()}, strict=False)
    assert not found.unexpected_keys, found
    assert all("num_batches" in name for name in found.missing_keys), found
    batch = {n: torch.tensor(a, device=device) for n, a in entry.arrays(device).items()}
    if mode == "channels-last" or (is_gpu and entry.is_image):
        model = model.to(memory_format=torch.channels_last)
        layout = torch.channels_last
        batch = {n: a.to(memory_format=layout) if a.ndim == 4 else a for n, a in batch.items()}
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, BETAS, EPSILON, weight_decay=DECAY, fused=True
    )
    options = {"compile": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
    of: Any = torch.compile(model, **options[mode]) if mode in options else model
    is_narrow = entry.precision(device) == "bfloat16"
    narrow = torch.autocast(device, torch.bfloat16, enabled=is_narrow)
    last: list[Any] = [None]

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with narrow:
            value = of(batch)
        value.backward()
        optimizer.step()
        last[0] = value.detach()

    return Running(
        run,
        torch.cuda.synchronize if is_gpu else lambda: None,
        lambda: float(last[0]),
        (lambda: (torch.cuda.max_memory_allocated() - before) / 2**20) if is_gpu else None,
    )


def begin(device: str) -> None:
    """The driver and its libraries are started for everybody before anything is timed."""
    if device == "cuda" and importlib.util.find_spec("torch") is not None:
        import torch

        torch.zeros(1, device=device).sum().item()


def prepare(start: Start, task: dict[str, Any]) -> Callable[[], Running]:
    """A task names an entry, a device and the file with first values."""
    begin(task["device"])
    with np.load(task["values"]) as file:
        values = {n: file[n] for n in file.files}
    return functools.partial(start, ZOO[task["workload"]], task["device"], values)


def contender(name: str, modules: tuple[str, ...], start: Start) -> Contender:
    return Contender(name, modules, functools.partial(prepare, start))


MODES = ("eager", "channels-last", "compile", "reduce-overhead")
CONTENDERS = {
    "treadle": contender(
        "treadle", ("treadle.backends.cpu.backend", "llvmlite.binding"), treadle_start
    )
} | {m: contender(m, ("torch",), functools.partial(torch_start, m)) for m in MODES}
