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
class Target:
    """What a machine can do, and sizes at which kernels are fused and cut for it.

    Sizes without another word were chosen on the workloads of bench/models.py.
    """

    name: str
    # What the machine can do. Passes ask these; none asks which machine it is.
    is_spmd: bool = False  # a thread for each element, in place of vectors and blocks in a cache
    has_launches: bool = False  # a kernel is a launch: dear, and shared by equal ones of a phase
    fuses_epilogues: bool = False  # a matmul adds its bias; parts are written into their whole
    fuses_column_sums: bool = False  # sums of columns are made by the kernel that makes the rows
    chooses_layouts: bool = False  # axes may lie in memory in another order than they are counted
    rematerializes: bool = False  # arithmetic is nearly free: values are recomputed from any tensor
    copies_operands: bool = True  # a matmul copies operands into panels, and may compute them there
    inlines_constants: bool = True  # a number is written into the code that reads it
    keeps_serial_apart: bool = False  # loops in order stay in kernels of their own
    is_gpu: bool = False
    has_attention: bool = False  # whether a library computes attention
    has_conv: bool = False  # whether one computes convolutions
    without: frozenset[Any] = frozenset()  # library calls that it said it has not
    is_small: bool = False  # launches cost more than the arithmetic: loops compute matmuls too
    # Sizes.
    least_rows: int = 8  # of fused kernels that had as many: something to share
    small: int = 4096  # elements: kernels that are smaller are not worth sharing
    most_statements: int = 120
    most_small_statements: int = 40  # of kernels that one thread (or block) runs
    cache: int = 3 << 20  # bytes that an iteration may write: what follows should find them near
    parts: int = 1 << 14  # elements from which a reduction is worth sharing out
    panels: int = 8 << 20  # bytes that matmuls of one kernel may read in each iteration
    few: int = 0  # elements, up to which kernels of few rows are fused on a GPU
    most_buffers: int = 1 << 20  # of a kernel
    least_logits: int = 1 << 20  # elements from which a head's logits are computed by chunks
    fills: int = 0  # tiles of a matmul that keep it busy: smaller ones of equal layers are batched
    fusion: Fusion = Fusion()
    matmuls: Matmuls = Matmuls()
    streaming: Streaming = Streaming()
    mapping: Mapping = Mapping()


CPU = Target("cpu")
# A block walks a row in shared memory; a matmul is a library's, so nothing is fused around it.
GPU = Target(
    "gpu",
    is_spmd=True,
    has_launches=True,
    fuses_epilogues=True,
    fuses_column_sums=True,
    chooses_layouts=True,
    rematerializes=True,
    copies_operands=False,
    inlines_constants=False,
    keeps_serial_apart=True,
    is_gpu=True,
    least_rows=512,
    small=2048,
    cache=1 << 15,
    panels=1 << 40,
    few=1 << 16,
    most_buffers=60,
    fills=512,
)
