"""What CUDA's libraries do once in a process, done while a program is traced and scheduled.

Loading them, their handles, the compiler's first run: a second and more in all, and Python's lock
is free meanwhile. An error is not told here: whoever needs the library then asks for it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from treadle.kernel.launch import MatmulCall, MatrixFacts
from treadle.kernel.target import GPU
from treadle.runtime.cpu.processors import default_threads
from treadle.runtime.cuda import dnn_backend
from treadle.runtime.cuda.blas import Matmul, blas_handle, noise, workspace
from treadle.runtime.cuda.compiler import compile_source
from treadle.runtime.cuda.compilers import compilers
from treadle.runtime.cuda.conv import first_call, numbered_convolution
from treadle.runtime.cuda.device import Block, device
from treadle.runtime.cuda.dnn import has_dnn
from treadle.runtime.cuda.once import once

FEW = 256  # rows and columns of the first matmul
EMPTY = 'extern "C" __global__ void empty() {}'


@once
def begin_libraries() -> None:
    """The compiler, matmuls, and what knows whether cuDNN is there."""
    _begin(_compiler)
    _begin(_matmuls)
    _begin(has_dnn)


@once
def begin_dnn() -> None:
    """cuDNN itself, for programs that call it: a handle, and a first plan that it compiles."""
    _begin(_dnn)


def _begin(work: Callable[[], object]) -> None:
    """In a thread that the process waits for when it ends: a library is not left half loaded."""

    def run() -> None:
        with suppress(Exception):
            device().enter()  # the context is a thread's
            work()

    threading.Thread(target=run).start()


def _compiler() -> None:
    asked = compilers()
    if asked is not None:
        asked.begin(min(default_threads(), GPU.launching.compilers))
    compile_source(EMPTY, device().architecture)


def _dnn() -> None:
    dnn_backend.shared_handle()
    with dnn_backend.own_handle():  # others may use the shared one meanwhile
        numbered_convolution(first_call(), 0)


def _matmuls() -> None:
    """What all matmuls share, and a small one: the library's heuristics and first kernel."""
    blas_handle()
    workspace()
    noise()
    facts = MatrixFacts("bfloat16", FEW, 1, 0, 0)
    matmul = Matmul(MatmulCall(FEW, FEW, FEW, 1, facts, facts, facts))
    blocks = [Block(2 * FEW * FEW) for _ in range(3)]
    with device().lock:
        matmul.take_first(*(block.address for block in blocks))
        device().wait()  # before the blocks are given back
