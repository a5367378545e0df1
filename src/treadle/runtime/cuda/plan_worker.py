"""A process that plans convolutions of cuDNN for another: a line for each, a line with its plan.

What cuDNN does once is done before the first line is read; that process is then told.
"""

from __future__ import annotations

import base64
import os
import select
from typing import BinaryIO

from treadle.base.records import from_json
from treadle.runtime.cuda.conv import first_call, numbered_convolution
from treadle.runtime.cuda.device import device
from treadle.runtime.cuda.workers import READY, Asked

PATIENCE = 60  # seconds without a line after which the process ends


def plan_of(asked: Asked) -> bytes:
    """The packed plan of a call; nothing where there is none, which the other process then says."""
    try:
        made = numbered_convolution(asked.call, asked.number)
        return b"" if made is None else made.packed()
    except Exception:
        return b""


def serve(given: BinaryIO, found: BinaryIO) -> None:
    plan_of(Asked(first_call(), 0))
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
    serve(os.fdopen(0, "rb", buffering=0), found)


if __name__ == "__main__":
    main()
