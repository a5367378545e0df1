"""What a schedule must know of the machine it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fusion:
    """When kernels are fused, ordered and given lanes (schedule: fuse, order, finish, split).

    Values without a reason of their own were chosen; no measurement of them is on record.
    """

    shared_iterations: int = 32  # of the outermost loop, for threads to share evenly
    shared_input: int = 64  # elements above which reading the same input is a reason to fuse
    read_once: int = 1 << 16  # elements of an input that two column sums should read only once
    row_flops: int = 1 << 13  # of a fused row that takes less than a launch
    block_flops: int = 1 << 12  # of all rows that are one block's, less than a launch too
    shared_memory: int = 32 << 10  # bytes that a block's own buffers take; every device has 48 KiB
    delayed_bytes: int = 8 << 20  # that may live longer so that equal kernels share a launch
    moved_bytes: int = 1 << 18  # of a result from which its kernel runs as late as possible
    # Lanes of a vector loop.
    least_lanes: int = 8  # iterations of a sum from which they are lanes
    most_private_lanes: int = 32  # that have private memory: two vectors of the widest kind
    fewest_private_lanes: int = 4  # fewer are left a plain loop
    private_bytes: int = 1 << 18  # of all lanes together: a quarter of a core's second cache
    # Loops that are cut where a guard changes.
    most_pieces: int = 8
    least_piece: int = 16  # iterations: shorter pieces gain nothing


@dataclass(frozen=True, slots=True)
class Reductions:
    """How sums are shared out, cut into blocks, and fused with rows (schedule: sums, trees).

    Numbers of threads and blocks were chosen for an H200, the device of docs/cuda.md. Values
    without a reason of their own were chosen; no measurement of them is on record.
    """

    fewest_parts: int = 8  # of a reduction that is made in two steps
    least_part: int = 16  # elements of a part, and parts of a sum without columns on a processor
    blocks: int = 1024  # of a reduction along rows: enough for every multiprocessor
    threads: int = 1 << 19  # of a reduction that keeps columns: as many as a device has at a time
    image_threads: int = 1 << 16  # the same of images, which have many rows: a block sums many
    few_columns: int = 1024  # up to which parts are fewer and larger, to be made with the rows
    counted: int = 64  # elements of an axis up to which sorting by counting is no slower
    # Additions one after another: errors grow with their number (measured: docs/decisions.md).
    longest_sum: int = 64
    longest_lane_sum: int = 4096  # iterations; lanes add in at least 16 accumulators side by side
    lane_block: int = 2048  # longer than others, as each block ends with a sum of all lanes
    # Column sums that are fused with the rows: a warp holds the columns of a row in registers.
    least_columns: int = 128
    most_columns: int = 1024
    least_row_parts: int = 64
    least_part_rows: int = 8
    most_fused_sums: int = 3
    most_row_vectors: int = 4  # of 16 bytes, that a lane holds of a row


@dataclass(frozen=True, slots=True)
class Materialization:
    """Which tensors are in memory, and which are recomputed where they are read (keep)."""

    most_depth: int = 40  # of an expression: what is deeper is materialized
    # What a choice between elements adds to the depth: indices grow, and all is behind guards.
    choice_depth: int = 13
    # Computations that only repeat another one at other elements of the same tensor: halves of
    # halves of a tensor double at each level, and so would the kernel.
    most_repeats: int = 16
    most_operations: int = 16  # to recompute a value rather than to materialize it
    small_share: int = 8  # a tensor of less than this part of the result costs nothing to read
    # Bytes of activations that may wait for the backward pass; fewer stay in a cache until then.
    waiting_bytes: int = 16 << 20


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

    Sizes without a reason of their own were chosen; no measurement of them is on record.
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
    panel: int = 32  # columns of a matmul's tile, of four bytes: two vectors of the widest kind
    fusion: Fusion = Fusion()
    reductions: Reductions = Reductions()
    materialization: Materialization = Materialization()
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
