"""What a schedule must know of the machine it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fusion:
    """When kernels are fused, ordered and cut (schedule: fuse, order, finish, sums, trees)."""


@dataclass(frozen=True, slots=True)
class Matmuls:
    """Sizes of contractions, convolutions and their panels (schedule: products, convolutions)."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """Blocks of attention and of the cross-entropy head (schedule: attention, head, chunks)."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """How loops are spread over a GPU's grid, blocks, warps and lanes (schedule/mapping)."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """How calls are cut for threads, and how threads wait (memory/assemble, runtime)."""

    # Operations of a task, some microseconds. With twice as many GPT 4 × 128 and an LSTM took 2 to
    # 3 % longer (docs/decisions.md).
    operations: int = 1 << 15
    serial: int = 1 << 14  # operations of a phase that one thread runs: a barrier costs more
    most: int = 128  # of a call: chosen, several for each thread of a large machine
    # Numbers of tasks are powers of two up to it, then multiples of it: equal shares for threads.
    even: int = 16
    barrier_spins: int = 2000  # chosen: before the processor is offered to other threads
    idle_spins: int = 200_000  # chosen: some milliseconds between steps, before a thread sleeps


@dataclass(frozen=True, slots=True)
class Arena:
    """How much larger the arena may be so that the operands of a batch lie evenly (memory/plan)."""

    part: int = 32  # of the arena, one of so many parts: chosen, 3 %
    nbytes: int = 32 << 20  # in any case: chosen, little beside a GPU's memory


@dataclass(frozen=True, slots=True)
class Launching:
    """How steps are given to a GPU, and what its libraries are asked for (runtime/cuda)."""

    steps: int = 16  # in one launch, of a list of batches: Python is then no part of a step's time
    most_inputs: int = 64 << 20  # bytes of the inputs of steps that are one launch: chosen
    small_results: int = 1 << 16  # bytes that are copied back with every step: chosen
    ahead: int = 3  # launches that the host may be ahead: inputs are copied while the GPU computes
    graphs: int = 8  # of a slot, one for each set of arrays on the device: chosen
    matmul_candidates: int = 32  # algorithms of cuBLASLt that are timed
    matmul_workspace: int = 64 << 20  # bytes
    conv_plans: int = 12  # plans of cuDNN that are timed
    conv_workspace: int = 1 << 30  # bytes: a plan that needs more is passed over


@dataclass(frozen=True, slots=True)
class Target:
    """Sizes at which kernels are fused and cut. A processor's caches, or a GPU's many blocks."""

    name: str
    least_rows: int  # of fused kernels that had as many: something to share
    small: int  # elements: kernels that are smaller are not worth sharing
    most_statements: int
    most_small_statements: int  # of kernels that one thread (or block) runs
    cache: int  # bytes that a turn may write: what follows should find them near
    parts: int  # elements from which a reduction is worth sharing out
    panels: int = 8 << 20  # bytes that products of one kernel may read in each turn
    few: int = 0  # elements, up to which kernels of few rows are fused on a GPU
    most_buffers: int = 1 << 20  # of a kernel
    keeps_serial_apart: bool = False  # loops in order stay in kernels of their own
    is_gpu: bool = False
    least_logits: int = 1 << 20  # elements from which a head's logits are computed by chunks
    has_attention: bool = False  # whether a library computes attention
    is_small: bool = False  # launches cost more than the arithmetic: loops compute products too
    has_conv: bool = False  # whether one computes convolutions
    without: frozenset[Any] = frozenset()  # routines that it said it has not
    fills: int = (
        0  # tiles of a product that keeps it busy: smaller ones of equal layers are batches
    )
    fusion: Fusion = Fusion()
    matmuls: Matmuls = Matmuls()
    streaming: Streaming = Streaming()
    mapping: Mapping = Mapping()
    tasks: Tasks = Tasks()
    arena: Arena = Arena()
    launching: Launching = Launching()


CPU = Target("cpu", 8, 4096, 120, 40, 3 << 20, 1 << 14)
# A block walks a row in shared memory; a product is a library's, so nothing is fused around it.
GPU = Target(
    "gpu", 512, 2048, 120, 40, 1 << 15, 1 << 14, 1 << 40, 1 << 16, 60, True, True, fills=512
)
