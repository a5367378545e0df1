"""The part of a target that contractions ask for."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.kernel.cost import LINE


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
    # ones share out well. Measured: 64 beats 32 by 1 to 2 % from 512 rows; with tiles of 6 rows 16
    # beats 8, two tiles of 4, by 8 % of the small MLP, and with tiles of 8 they are the same.
    row_blocks: tuple[tuple[int, int], ...] = ((512, 64), (256, 32), (128, 16), (0, 8))
    most_block_rows: int = 512  # that threads which share columns take as one block: chosen
    # Rows for each column of a panel, up to which copies of the right operand do not pay: measured
    # on a product of 128 rows, which gains 8 % with AVX2 and loses 2 % with AVX-512.
    few_rows: int = 4
    # The same where a panel's row is one line and the depth so small that a panel's lines stay in
    # the first cache where they lie: measured with AVX2 (bench/README.md, "Few rows"). A copy of
    # which another thread has made a part costs more than it saves where cores are far apart.
    few_shallow_rows: int = 16
    shallow: int = 256
    # Bytes of a right operand up to which they do not, where a panel's row is two lines, and where
    # it is one; and bytes of its rows then. Measured (bench/README.md, "Few rows").
    near_bytes: int = 4 << 20
    near_lines: int = 1 << 20
    near_row: int = 4096
    summed_rows: int = 2  # up to which weights are summed as they lie: crossing at 4, measured
    summed_heads: int = 8  # the same in batches: heads that share keys and values, chosen
    # Elements of such a batch up to which a GPU needs no library: a cache of some thousand slots.
    summed_batch: int = 1 << 20
    few_tasks: int = 4  # blocks of rows, below which threads share columns or depth: chosen
    # Products beside each other, from which their rows need not be shared: chosen, several for each
    # of many threads.
    many_tasks: int = 32
    # Operations of each matmul of a batch in the last axis, from which that axis is moved to the
    # front rather than loops run along it: measured, they cross between 24³ and 32³ multiply-adds.
    moved_flops: int = 1 << 16
    least_columns: int = 8  # columns that lie together, to be read without a copy: a vector of AVX2
    long_depth: int = 32  # elements, from which scattered left rows are copied
    reused_panels: int = 4  # panels that must use such a copy: chosen
    split_depth: int = 8192  # elements, from which parts of the depth are summed apart: chosen
    most_parts: int = 16  # of such a depth: enough for the threads of a processor
    # Threads share panels of columns from so many operations on: chosen, about 5 µs of one core.
    shared_flops: int = 1 << 19
    # How many times fewer elements must then go from one core to another: measured on the MLPs and
    # the LSTM (docs/decisions.md, "Few rows of many weights").
    exchange_gain: int = 4
    # Columns that a thread copies for itself and multiplies.
    group_columns: int = 128  # at most: chosen, so that a copy's rows are runs of some lines
    group_tasks: int = 8  # groups of weights, at least where there are as many panels: chosen
    copied_rows: int = 24  # rows from which copied windows pay: chosen, each is used as often
    copied_elements: int = 1 << 16  # of a copy: half of a second cache of 512 KiB
    full_lanes: float = 1.2  # lanes for each column, up to which windows are read where they are
    # Rows of a right operand copied at a time: rows that are pages apart share the ways of a set of
    # the first cache, of which there are 8. Measured: 16 take a tenth longer with rows of 4 KiB.
    packed_rows: int = 8
    copied_depth: int = 128  # elements of the depth that a transposed copy takes at a time: chosen
    copy_tasks: int = 32  # tasks of such a copy, so that threads share it evenly: chosen

    # Matmuls, convolutions and attention of a library
    pack: int = 8  # elements of a library's widest loads, 16 bytes of narrow floats
    has_float8: bool = False  # whether it multiplies floats of 8 bits: from chips of 8.9 on
    scales_float8: bool = True  # and multiplies the product by numbers of the device
    float8_pack: int = 16  # elements of which their axes are multiples: cuBLASLt's 16 bytes
    # Whether kernels of our own multiply where an elementwise kernel follows, and the depth up to
    # which they do for each pass over the result that is saved. Timed on an H200 at depths of 192
    # to 1,024 (docs/cuda.md); deeper, a pass is a smaller part of the time than a library is ahead.
    finishes: bool = False
    finished_depth: int = 1792
    finished_blocks: int = 264  # tiles, from which on: two for each multiprocessor
    # Elements of the depth for each operation on an element: warps that finish a tile have as long
    # as it takes to multiply the next. Chosen.
    finished_work: int = 20
    most_depth: int = 256  # elements of a head of attention: cuDNN's on compute capability 9.0
    # Scores of a head up to which attention is faster by its definition than by cuDNN, whose blocks
    # are of 128 queries and keys: without a bias, and with one for each score, whose gradient cuDNN
    # writes for all batches before it sums it. Timed on an H200 (docs/decisions.md, "Short rows").
    short_scores: int = 32 * 32
    short_biased_scores: int = 96 * 96
    least_pitched: int = 64  # elements of a row that may be followed by up to a pack of nothing
    # Operations, below which a thread for each element is as fast: chosen.
    flops_for_library: int = 1 << 16
    depth_for_library: int = 4  # elements of the depth, below which it is too: chosen
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

    def most_summed(self, batch: int) -> int:
        """Rows up to which weights, or the keys of a batch, are summed as they lie."""
        return self.summed_heads if batch > 1 else self.summed_rows

    def rows_of_panel(self, columns: int, itemsize: int, depth: int) -> int:
        """Rows up to which copying a right operand into panels does not pay."""
        is_shallow = columns * itemsize <= LINE and depth <= self.shallow
        return columns * (self.few_shallow_rows if is_shallow else self.few_rows)

    def block_rows(self, rows: int) -> int:
        """Rows of a block: enough to reuse what is read of the right operand, and many blocks.

        The next panel is prefetched, so that few rows do. A thread that is held up (a timer,
        another process) is waited for by a block's time at most.
        """
        return next(size for least, size in self.row_blocks if rows >= least)


MATMULS = Matmuls()
