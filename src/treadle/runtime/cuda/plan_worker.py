"""A process that plans calls of cuDNN for another: a line for each call, a line with its plan.

`python -m treadle.runtime.cuda.plan_worker attention` or `conv`. What cuDNN does once for a kind of
call is done before the first line is read; that process is then told.
"""

from __future__ import annotations

import base64
import os
import select
import sys
from typing import BinaryIO

from treadle.base.records import from_json
from treadle.kernel.launch import LibraryLaunch, Tensor
from treadle.runtime.cuda.attention import planned_attention
from treadle.runtime.cuda.conv import numbered_convolution
from treadle.runtime.cuda.device import device
from treadle.runtime.cuda.workers import READY, Asked

PATIENCE = 60  # seconds without a line after which the process ends


def plan_of(asked: Asked) -> bytes:
    """The packed plan of a call; nothing where there is none, which the other process then says."""
    try:
        if "conv" not in asked.call.name:
            return planned_attention(asked.call, asked.is_deterministic).packed()
        made = numbered_convolution(asked.call, asked.number)
        return b"" if made is None else made.packed()
    except Exception:
        return b""


def first_calls(kind: str) -> list[LibraryLaunch]:
    """Small calls of a kind, as which most are: causal attention, a depthwise convolution."""
    shape = (1, 8, 64, 64)
    images = [_tensor(i, s) for i, s in enumerate(((1, 64, 8, 8), (64, 1, 3, 3), (1, 64, 8, 8)))]
    if kind == "conv":
        names = {"low": 1.0, "high": 1.0, "stride": 1.0, "dilation": 1.0}
        numbers = tuple((f"{n}{i}", x) for n, x in names.items() for i in range(2))
        return [LibraryLaunch("conv", (images[2],), (images[0], images[1]), numbers)]
    numbers = (("scale", 0.125), ("causal", 1.0))
    q, k, v, out, *more = (_heads(i, shape) for i in range(9))
    sums = Tensor(9, "float32", 0, shape[:3], (8 * 64, 64, 1))
    forward = LibraryLaunch("attention", (out, sums), (q, k, v), numbers)
    given = (more[0], out, sums, q, k, v)
    return [forward, LibraryLaunch("attention_grad", tuple(more[1:4]), given, numbers)]


def _tensor(number: int, shape: tuple[int, int, int, int]) -> Tensor:
    """Channels last."""
    _, c, h, w = shape
    return Tensor(number, "bfloat16", 0, shape, (h * w * c, 1, w * c, c))


def _heads(number: int, shape: tuple[int, int, int, int]) -> Tensor:
    _, h, t, d = shape
    return Tensor(number, "bfloat16", 0, shape, (h * t * d, t * d, d, 1))


def serve(given: BinaryIO, found: BinaryIO, kind: str) -> None:
    for call in first_calls(kind):
        plan_of(Asked(call, False, 0))
    found.write(READY)
    found.flush()
    while select.select([given], [], [], PATIENCE)[0]:
        line = given.readline()
        if not line:
            return  # the other process has what it wanted, or is gone
        found.write(base64.b64encode(plan_of(from_json(Asked, line))) + b"\n")
        found.flush()


def main() -> None:
    found = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print
    device().enter()
    serve(os.fdopen(0, "rb", buffering=0), found, sys.argv[1])


if __name__ == "__main__":
    main()
