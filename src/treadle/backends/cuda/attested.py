"""The library calls of a program on this device, each run once beside the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from treadle.kernel.claims import Claim
from treadle.kernel.launch import Launch, LibraryLaunch, MatmulCall
from treadle.runtime.cuda.blas import Matmul
from treadle.runtime.cuda.calls import Called
from treadle.runtime.cuda.device import Block, device
from treadle.runtime.cuda.program import CudaProgram

LIBRARY = "is a library's"  # how the reason of a kernel's claim ends that is nothing but a call


def with_attested(claims: Sequence[Claim], program: CudaProgram) -> list[Claim]:
    """Claims of kernels that are library calls, replaced by what running them has shown."""
    lines = {c.name: c.lines for c in claims if c.kind == "kernel"}
    found = [replace(c, lines=lines.get(c.name, ())) for c in attested(program)]
    return [*(c for c in claims if not c.reason.endswith(LIBRARY)), *found]


def attested(program: CudaProgram) -> list[Claim]:
    """Every distinct call of a library: matmuls, their batches, attention and convolutions."""
    from treadle.verify.library import attest

    runner, names = program.runner, [k.name for k in program.plan.kernels]
    found: list[Claim] = []
    seen: set[MatmulCall | LibraryLaunch] = set()

    def add(call: MatmulCall | LibraryLaunch, run: Callable[[list[int]], None], name: str) -> None:
        if call not in seen:
            seen.add(call)
            found.append(attest(call, lambda arrays: _computed(arrays, run), name))

    with program.in_turn():
        for entry, launch in enumerate(program.launches):
            if entry in runner.matmuls:
                add(_matmul_of(launch), _multiplied(runner.matmuls[entry]), names[entry])
            elif entry in runner.called_entries and launch.called is not None:
                add(launch.called, _called(runner.called_entries[entry]), names[entry])
        for (entry, *_), matmul in runner.batches.items():
            add(matmul.matmul, _multiplied(matmul), names[entry])
    return found


def _matmul_of(launch: Launch) -> MatmulCall:
    assert launch.matmul is not None
    return launch.matmul


def _computed(arrays: Sequence[np.ndarray], run: Callable[[list[int]], None]) -> list[np.ndarray]:
    """Arrays on the device, a call on them, and what they are then."""
    blocks = [Block(max(1, a.nbytes)) for a in arrays]
    for block, array in zip(blocks, arrays, strict=True):
        block.write(array)
    run([b.address for b in blocks])
    device().wait()
    return [b.read(np.empty_like(a)) for b, a in zip(blocks, arrays, strict=True)]


def _multiplied(matmul: Matmul) -> Callable[[list[int]], None]:
    def run(addresses: list[int]) -> None:
        left, right, *others, target = addresses
        has_bias = matmul.matmul.bias >= 0
        bias, scales = (others[0], others[1:]) if has_bias else (0, others)
        code = matmul.run(target, left, right, bias, *scales)
        if code:
            raise AssertionError(f"cuBLASLt says {code} for {matmul.matmul}")

    return run


def _called(call: Called) -> Callable[[list[int]], None]:
    def run(addresses: list[int]) -> None:
        workspace = Block(max(1, call.workspace))
        call.run(addresses, workspace.address, device().stream)
        device().wait()  # before the workspace is given back

    return run
