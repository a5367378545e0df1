"""What a schedule must know of the machine it is for."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    """How loops are spread over a GPU's grid, blocks, warps and lanes (schedule/mapping).

    Sizes were chosen by timing whole steps on an H200 (docs/cuda.md) where nothing else is said.
    """

    # Hardware
    warp: int = 32  # threads
    pack: int = 16  # bytes of the widest access
    arguments: int = 3840  # bytes of a launch's arguments; CUDA takes 4 KB
    shared_limit: int = 227 << 10  # bytes of shared memory of a block: compute capability 9.0
    # A thread or a group for each iteration of the grid
    lanes: int = 8  # iterations that a thread takes at once, at most
    threads: int = 256  # of a block whose threads work apart
    warp_threads: int = 128  # of a block whose warps work apart
    few_threads: int = 512  # of a block that shares an iteration, at most; 256 fill an H200
    most_threads: int = 1024  # the same, where there are few iterations
    many: int = 256  # iterations of the grid from which they count as many
    busy: int = 1 << 15  # threads that keep a device busy
    short: int = 16  # terms of a sum that is one thread's where there are enough threads
    short_loop: int = 8  # iterations of any other loop, likewise
    warp_row: int = 2048  # elements of a row that is still a warp's, where there are many rows
    many_rows: int = 1024
    warp_work: int = 512  # operations of an iteration that is a warp's, in a cooperative launch
    private: int = 512  # bytes of scratch that a thread may have by itself
    beside: int = 4096  # sums whose neighbours' elements lie side by side: a thread's each
    # Rows that a group walks several times
    unrolled: int = 4  # packs of a row that a thread holds in registers, at most
    registers: int = 160  # bytes of such rows
    staged: int = 110 << 10  # bytes of such rows in shared memory: two blocks fit a multiprocessor
    least_staged: int = 4 << 10  # bytes: a shorter row is in the cache
    ahead: int = 4  # packs that a thread asks for before it uses the first
    part_warps: int = 6  # warps that share rows and sum columns: two blocks have their registers
    # Sums of columns
    column_warps: int = 8  # that share a column; as many as a block has, where blocks are few
    few_blocks: int = 64
    column_bytes: int = 40 << 10  # of shared memory for the warps' parts
    least_each: int = 2  # rows that a thread should have at least
    tallest: int = 32  # threads that share a column by a tree
    tall_rows: int = 4  # rows that each of them should have at least
    tall_bytes: int = 32 << 10  # of shared memory for their parts
    tall_threads: int = 1 << 18  # of the grid, beyond which a column is not shared
    # Contractions in tiles
    least_depth: int = 16
    least_side: int = 4
    least_work: int = 1 << 14  # multiply-adds
    tile_bytes: int = 96 << 10  # of shared memory for the panels
    tile_thread: int = 4  # rows and columns of a thread, at most
    tile_unroll: int = 8  # steps along a tile's depth that are written out
    in_flight: int = 96  # numbers that a thread holds on their way to shared memory
    blocks: int = 128  # that run at a time
    fewest_blocks: int = 8  # that a contraction gets beside larger ones
    has_matmul: bool = True  # whether a library computes standalone matmuls
    # Sums whose indices are data
    scatter_threads: int = 512
    scatter_rows: int = 32  # of the result, that a block owns at most
    scatter_bytes: int = 76 << 10  # of shared memory for them
    scatter_least: int = 1 << 12  # updates times columns: fewer are one thread's each
    scatter_noted: int = 384  # updates that a warp can note at a time
    scatter_looked: int = 8  # indices that a thread looks at in one go
    scatter_terms: int = 8  # numbers that a thread loads before it adds the first
    # Cooperative launches
    is_cooperative: bool = True  # phases of small programs are one launch
    light: int = 1 << 27  # operations of a phase that takes about as long as a launch
    most_parts: int = 48  # kernels of one launch: more take long to compile


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
    mapping: Mapping | None = None  # none where a loop's iterations are a processor's


CPU = Target("cpu", 8, 4096, 120, 40, 3 << 20, 1 << 14)
# A block walks a row in shared memory; a product is a library's, so nothing is fused around it.
GPU = Target(
    "gpu", 512, 2048, 120, 40, 1 << 15, 1 << 14, 1 << 40, 1 << 16, 60, True, True, fills=512,
    mapping=Mapping(),
)  # fmt: skip
# Sizes of NVIDIA's, but for what the hardware's definition says: warps of CDNA have 64 threads, and
# a block has 64 KB of shared memory. Nothing was timed.
AMD = replace(GPU, name="amd", mapping=Mapping(warp=64, shared_limit=64 << 10, staged=64 << 10))
