"""What a schedule must know of the machine it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fusion:
    """When kernels are fused, ordered and cut (schedule: fuse, order, finish, sums, trees)."""


@dataclass(frozen=True, slots=True)
class Matmuls:
    """Sizes of contractions and their panels (schedule: matmuls, packing, standalone, batched).

    Values are a processor's where they are about loops and caches, and a GPU's where they are about
    a library. "Chosen" ones bound a cost that was not measured by itself.
    """

    # Whether large matmuls are a library's, in kernels of their own: nothing is fused around them.
    by_library: bool = False

    # Loops around the matmul template
    depth: int = 1024  # elements summed at a time: measured 1 % faster than 512, 1,536 the same
    # Rows of a matmul, and rows of its blocks from there on. Large blocks reuse a panel, many small
    # ones share out well. Measured: 64 beats 32 by 1 to 2 % from 512 rows, smaller ones gain below.
    row_blocks: tuple[tuple[int, int], ...] = ((512, 64), (256, 16), (0, 8))
    few_rows: int = 128  # rows, up to which panels of the right operand do not pay: chosen
    few_tasks: int = 4  # blocks of rows, below which threads share columns or depth: chosen
    least_columns: int = 8  # columns that lie together, to be read without a copy: a vector of AVX2
    long_depth: int = 256  # elements, from which scattered left rows are copied: chosen
    reused_panels: int = 4  # panels that must use such a copy: chosen
    split_depth: int = 8192  # elements, from which parts of the depth are summed apart: chosen
    most_parts: int = 16  # of such a depth: enough for the threads of a processor
    # Threads share panels of columns from so many operations on: chosen, about 5 µs of one core.
    shared_flops: int = 1 << 19
    # How many times fewer elements must then go from one core to another: measured on the MLPs and
    # the LSTM (docs/decisions.md, "Few rows of many weights").
    exchange_gain: int = 4
    packed_rows: int = 16  # rows of a right operand copied at a time: chosen
    copied_depth: int = 128  # elements of the depth that a transposed copy takes at a time: chosen
    copy_tasks: int = 32  # tasks of such a copy, so that threads share it evenly: chosen

    # Matmuls, convolutions and attention of a library
    pack: int = 8  # elements of a library's widest loads, 16 bytes of narrow floats
    # Operations, below which a thread for each element is as fast: chosen.
    library_flops: int = 1 << 16
    library_depth: int = 4  # elements of the depth, below which it is too: chosen
    # A graph whose wide matmuls are no larger, each and all together, is computed by loops: its
    # launches would cost more than its arithmetic. Chosen, an edge of a CUDA graph costs 1 to 3 µs.
    launch_flops: int = 1 << 26
    launch_flops_of_graph: int = 1 << 28
    tile: int = 128  # rows and columns that one multiprocessor computes at a time: cuBLASLt's usual
    # Tiles of a matmul that keeps a device busy; smaller ones of equal layers are batched. A GPU's
    # is about four for each multiprocessor of an H200; 0 batches nothing.
    busy_tiles: int = 0
    # Into how many batches equal matmuls of layers may go: the fewest that fit into memory.
    batch_counts: tuple[int, ...] = (1, 2, 3, 4, 6)
    # The part of the peak of live bytes by which batches may raise it, and bytes in any case:
    # chosen, so that they hardly change which models fit (docs/decisions.md, "Weight gradients").
    batch_memory_part: int = 12
    batch_memory: int = 32 << 20

    def block_rows(self, rows: int) -> int:
        """Rows of a block: enough to reuse what is read of the right operand, and many blocks.

        The next panel is prefetched, so that few rows do. A thread that is held up (a timer,
        another process) is waited for by a block's time at most.
        """
        return next(size for least, size in self.row_blocks if rows >= least)


@dataclass(frozen=True, slots=True)
class Streaming:
    """Blocks of the cross-entropy head (schedule: cross_entropy and its chunks).

    Chunks of rows: a processor's hold a twentieth of the logits, a GPU's fill the device.
    """

    least_rows: int = 64  # of a chunk: each reads and writes all of the weight's gradient
    most_rows: int = 256  # of a chunk: chosen, so that a block's logits stay in the second cache
    rows_multiple: int = 32  # of a chunk, if it has many: two vectors of the widest kind
    # Of all rows in a chunk: with its statistics, a twentieth of the memory of all logits.
    share: float = 0.047
    block: int = 96  # classes of a block: with 96 rows its logits are 36 KB, near the first cache
    depth: int = 96  # classes summed at a time into the input's gradient: a block
    column_groups: int = 4  # of the input's gradient: tasks for threads, each as wide as can be
    # Classes of the weight's gradient at a time: the rows of a register tile, of 16 and of 32
    # vector registers.
    tile_classes: int = 6
    wide_tile_classes: int = 8
    wide_panel: int = 32  # columns of a panel, from which there are 32 registers: two of AVX-512


@dataclass(frozen=True, slots=True)
class Mapping:
    """How loops are spread over a GPU's grid, blocks, warps and lanes (schedule/mapping)."""


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
    fusion: Fusion = Fusion()
    matmuls: Matmuls = Matmuls()
    streaming: Streaming = Streaming()
    mapping: Mapping = Mapping()


CPU = Target("cpu", 8, 4096, 120, 40, 3 << 20, 1 << 14)
# A block walks a row in shared memory; a product is a library's, so nothing is fused around it.
GPU = Target(
    "gpu",
    512,
    2048,
    120,
    40,
    1 << 15,
    1 << 14,
    1 << 40,
    1 << 16,
    60,
    True,
    True,
    matmuls=Matmuls(by_library=True, busy_tiles=512),
    # Rows: matmuls of half as many are a little slower, more take more memory (measured, H200).
    streaming=Streaming(least_rows=2048, most_rows=4096, rows_multiple=8),
)
