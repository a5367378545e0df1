"""What a schedule must know of the machine it is for.

Sizes without a reason of their own were chosen; no measurement of them is on record.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from treadle.base.dtypes import DType, accumulator
from treadle.kernel.costs import CPU_COSTS, GPU_COSTS, Costs
from treadle.kernel.target_matmuls import MATMULS
from treadle.kernel.target_matmuls import Matmuls as Matmuls
from treadle.kernel.target_memory import ARENA, RECOMPUTATION, Recomputation
from treadle.kernel.target_memory import Arena as Arena


@dataclass(frozen=True, slots=True)
class Fusion:
    """When kernels are fused, ordered and given lanes (schedule: fuse, order, finish, split)."""

    shared_iterations: int = 32  # of the outermost loop, for threads to share evenly
    shared_input: int = 64  # elements above which reading the same input is a reason to fuse
    summed: int = 32  # elements of an input for each of the results, of sums of much: chosen
    read_once: int = 1 << 16  # elements of an input that two column sums should read only once
    row_flops: int = 1 << 13  # of a fused row that takes less than a launch
    block_flops: int = 1 << 12  # of all rows that are one block's, less than a launch too
    # Operations of a part of a scan, in one iteration, that is a block's for all of them: chosen,
    # about what a block does while two launches are made.
    scan_part: int = 1 << 17
    shared_memory: int = 32 << 10  # bytes that a block's own buffers take; every device has 48 KiB
    delayed_bytes: int = 8 << 20  # that may live longer so that equal kernels share a launch
    moved_bytes: int = 1 << 18  # of a result from which its kernel runs as late as possible
    # Lanes of a vector loop.
    least_lanes: int = 8  # iterations of a sum from which they are lanes
    # Columns up to which rows are lanes, and rows from which they are. Measured on gradients of
    # 20,000 rows: 3 to 9 times as fast up to 7 columns, 1.05 to 1.7 times at 16 and 24, about even
    # at 32 (docs/decisions.md, "Rows of few columns are lanes").
    few_columns: int = 24
    least_rows: int = 16
    # Loads and stores of a row up to which they are: each is written out lane by lane. A softmax
    # and its gradient have 12; kernels of a hundred would be code that takes seconds to compile.
    most_row_accesses: int = 32
    most_private_lanes: int = 32  # that have private memory: two vectors of the widest kind
    fewest_private_lanes: int = 4  # fewer are left a plain loop
    private_bytes: int = 1 << 18  # of all lanes together: a quarter of a core's second cache
    most_phases: int = 4  # loops that one becomes whose iterations take turns: chosen
    # Loops that are cut where a guard changes.
    most_pieces: int = 8
    least_piece: int = 16  # iterations: shorter pieces gain nothing


@dataclass(frozen=True, slots=True)
class Reductions:
    """How sums are shared out, cut into blocks, and fused with rows (schedule: sums, trees).

    Numbers of threads and blocks were chosen for an H200, the device of docs/cuda.md.
    """

    fewest_parts: int = 8  # of a reduction that is made in two steps
    least_part: int = 16  # elements of a part, and parts of a sum without columns on a processor
    pack: int = 8  # elements that a thread takes of a row at once, at most: parts are whole packs
    blocks: int = 1024  # of a reduction along rows: enough for every multiprocessor
    threads: int = 1 << 19  # of a reduction that keeps columns: as many as a device has at a time
    image_threads: int = 1 << 16  # the same of images, which have many rows: a block sums many
    most_parts: int = 1024  # of a reduction: few columns leave the second step few threads
    few_columns: int = 1024  # up to which parts are fewer and larger, to be made with the rows
    # Elements of an axis up to which sorting by counting is no slower. A GPU's threads count side
    # by side, and merging costs them a launch for each doubling: chosen.
    counted: int = 64
    # The greatest or least elements up to so many are kept while a longer axis is gone through
    # once, so many elements at a time: chosen, each that is taken moves the others.
    selected: int = 16
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
    most_sources: int = 1  # large tensors that recomputing a value may read
    scan_sources: int = 8  # the same where every iteration of a scan would launch a kernel: chosen
    makes_parts: bool = False  # tensors put together of parts are made part by part, without guards
    most_parts: int = 8  # of such a tensor: stores of an iteration, chosen
    # Whether a tensor with a row put before or behind it is read where it lies: a scan's carries
    # moved on by one.
    reads_through_rows: bool = False
    small_share: int = 8  # a tensor of less than this part of the result costs nothing to read
    # Bytes from which a value that is made of such tensors alone is not worth its memory: chosen,
    # smaller ones stay in a cache.
    spread_bytes: int = 8 << 20
    # Of a value's bytes: leaves of at most this part are read instead wherever a matmul reads the
    # value. Blocks of 8 bits are 0.53 of bfloat16; a half is what a wider copy saves. Chosen.
    decoded_part: float = 0.6
    # Bytes of activations that may wait for the backward pass; fewer stay in a cache until then.
    waiting_bytes: int = 16 << 20
    # Whether masks of positions are computed wherever they are read: one word of memory for each
    # element, as WebGPU has them, takes longer than to compare two numbers.
    masks_in_place: bool = False
    # What the backward pass computes anew rather than that it waits from the forward pass:
    # operations an element, which take less than reading it; how many times its bytes are read for
    # that, of tensors that mostly are read anyway; and bytes of a tensor that is worth a thought.
    most_recomputed: int = 64
    recomputed_reads: int = 2
    least_recomputed: int = 1 << 18
    # Bytes of a matmul's or convolution's operand that is kept however it could be made: computed
    # anew it is written once more, which costs little where it is read from a cache. An H200 has 60
    # MiB of that.
    kept_operand: int = 64 << 20
    # Smaller ones from so many bytes on are kept too where a library multiplies, if what waits at
    # the peak grows by no more than this part of it: GPT-2 at batch 32 takes 0.989 of the time for
    # 3 % more memory, which 13 % of what waits come to (docs/decisions.md).
    least_kept: int = 32 << 20
    kept_part: int = 7


@dataclass(frozen=True, slots=True)
class Streaming:
    """Blocks of the cross-entropy head (schedule: cross_entropy and its chunks).

    Chunks of rows: a processor's hold a twentieth of the logits, a GPU's fill the device.
    """

    least_rows: int = 64  # of a chunk: each reads and writes all of the weight's gradient
    most_rows: int = 256  # of a chunk: chosen, so that a block's logits stay in the second cache
    # Rows of a chunk until there are so many chunks, from which on chunks get longer.
    usual_rows: int = 256
    usual_chunks: int = 0
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
    """How loops are spread over a GPU's grid, blocks, warps and lanes (schedule/mapping).

    Sizes were chosen by timing whole steps on an H200 (docs/cuda.md) where nothing else is said.
    """

    # Hardware
    warp: int = 32  # threads that run side by side
    exchanges: bool = True  # and give each other values; without it a group is a block
    pack: int = 16  # bytes of the widest access
    sector: int = 32  # bytes that memory moves at once
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
    # Terms of a sum that is one thread's where there are enough threads: a warp's would be idle.
    short: int = 32
    short_loop: int = 8  # iterations of any other loop, likewise
    warp_row: int = 2048  # elements of a row that is still a warp's, where there are many rows
    many_rows: int = 1024
    # The same of rows that are walked once, to sum products: 576 of 1,536 took 5.4 µs by warps and
    # 6.3 by blocks (H200, between events).
    many_products: int = 128
    warp_work: int = 512  # operations of an iteration that is a warp's, in a cooperative launch
    private: int = 512  # bytes of scratch that a thread may have by itself
    sorted_row: int = 2048  # elements of a line that a group sorts in its own memory: chosen
    scans: bool = True  # threads that share a loop see sums of the iterations before theirs
    beside: int = 4096  # sums whose neighbours' elements lie side by side: a thread's each
    # Where tensors lie along two axes: elements of the other axis from which threads walk tiles,
    # and those that a tile has: full lines of 128 bytes of both, in a block of 256 threads.
    least_across: int = 8
    across: int = 32
    # Rows that a group walks several times
    unrolled: int = 4  # packs of a row that a thread holds in registers, at most
    registers: int = 160  # bytes of such rows
    staged: int = 110 << 10  # bytes of such rows in shared memory: two blocks fit a multiprocessor
    least_staged: int = 4 << 10  # bytes: a shorter row is in the cache
    ahead: int = 4  # packs that a thread asks for before it uses the first
    scan_threads: int = 1 << 17  # of a scan, where it has as many parts: half of a device's
    scan_ahead: int = 8  # iterations of a scan whose slices a thread asks for at once: chosen
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
    tile_steps: int = 1  # of the depth that a thread takes at once
    tile_unroll: int = 8  # steps along a tile's depth that are written out
    tile_step: int = 32  # of which the depth of a panel is a multiple, unless it is all of it
    packs_narrow: bool = False  # threads take four elements of float16 at a time
    matrices: int = 0  # edge of matrices of float16 that a warp multiplies at once; 0 for none
    # Attention by matrices: rows of a warp, warps of a group, at least and at most, and rows of the
    # other side that they go through at a time, the most for which there is memory.
    strip: int = 16
    strips: tuple[int, int] = (4, 8)
    passing: tuple[int, ...] = (32, 16)
    in_flight: int = 96  # numbers that a thread holds on their way to shared memory
    blocks: int = 128  # that run at a time
    fewest_blocks: int = 8  # that a contraction gets beside larger ones
    has_matmul: bool = True  # whether a library computes standalone matmuls
    # Sums whose indices are data. Numbers that threads add to memory in one step, in any order;
    # none where the order is to be the same each time.
    adds_together: frozenset[str] = frozenset(["float32", "float64", "int32", "uint32", "int64"])
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
    # Bytes that such a phase moves, which take about as long: argmax over 64 MB took 0.75 ms as one
    # launch, whose blocks wait for each other, for 0.06 (H200).
    light_bytes: int = 8 << 20
    most_parts: int = 48  # kernels of one launch: more take long to compile

    @property
    def exchanging(self) -> int:
        """Threads that combine their parts without shared memory."""
        return self.warp if self.exchanges else 1

    def within(self, shared: int) -> Mapping:
        """For devices whose blocks have so many bytes of shared memory."""
        sizes = {
            name: min(getattr(self, name), shared)
            for name in ("staged", "tile_bytes", "scatter_bytes", "column_bytes", "tall_bytes")
        }
        return replace(self, shared_limit=shared, **sizes)


@dataclass(frozen=True, slots=True)
class Rewriting:
    """When graphs are rewritten, and which composites stay (rules; schedule: templates)."""

    # Whether a matmul and the cross-entropy that reads it are recognised as one head, which stores
    # no logits. Measured on an H200: those were 6 of the 17 GiB of a GPT-2 step of batch 32.
    fuses_heads: bool = False
    least_classes: int = 512  # classes of a head without stored logits: chosen, fewer are little
    least_head_logits: int = 1 << 22  # elements of a head that is recognised: chosen, 8 to 16 MB
    streams_narrow_logits: bool = False  # chunked heads take bfloat16 and float16 too
    # Queries and keys of a softmax of products that is recognised as attention, which written out
    # made a GPT-2 step of batch 4 take 1.8 times as long on an H200: chosen, fewer are little.
    least_fused_attention: int = 16
    # Blocks of 64 keys, of all heads: fewer would leave a device idle in the gradient. Chosen.
    least_key_blocks: int = 32
    blocks_attention: bool = True  # attention has kernels that go over blocks of keys
    # Scores of all heads from which groups of threads go over blocks of keys in shared memory and
    # store none, where no library has attention; 0 for never. Matmuls with stored scores are
    # faster where there is room: on a processor's Vulkan they took 0.61 to 0.67 of the time.
    least_scores: int = 0
    # The same where warps multiply blocks of float16 as matrices. Chosen: of 75 million scores a
    # step took 97.6 ms with none stored, 110.2 with all (SmolLM2, H200, bench/webgpu_gpu.sh).
    least_matrix_scores: int = 1 << 16
    # Positions of a block of queries or keys, chosen: 64 rows of 64 floats are half of a
    # first-level cache; causal blocks of 32 leave out more of the keys that come after a query;
    # lengths whose largest divisor is below 16 would give small matmuls.
    attention_block: int = 64
    causal_block: int = 32
    least_attention_block: int = 16
    attention_keys: int = 256  # keys that are one block where none divides them: chosen, 64 KB
    # Bytes of matmuls and reductions that a scan's iterations compute all at once, for each byte
    # of the slices they read: chosen, the gates of an LSTM are four times its input.
    most_stacked: int = 4
    # Bytes of a scan's slices for each byte that they are computed from, from which iterations
    # compute them: chosen, the states of a selective scan are 16 for each channel.
    least_spread: int = 4
    # Elements of a carry up to which a linear recurrence goes by blocks of iterations, 0 for never,
    # and iterations from which it does: chosen.
    most_blocked_scan: int = 0
    least_blocked_scan: int = 512
    # Running sums: threads that should have a block of one, 0 where one block is enough; elements
    # of a block that a thread goes through at least; and of one that a group shares, whose
    # elements lie side by side, 0 where none does.
    scan_parts: int = 0
    least_scan_block: int = 8
    scanned_row: int = 0
    # Elements of an axis whose best is found by two reductions: chosen. Along 49,152 one thread
    # that remembered where it was took 0.57 ms, two reductions take 0.03.
    least_arg: int = 1024
    scatters_cheaply: bool = True  # a scatter-add costs no more than a copy of its rows
    # Updates times rows of the result, from which a scatter-add sums sorted runs; 0 for never.
    # Otherwise every block of a GPU looks at every index (`scatter_rows` a block).
    least_sorted: int = 0
    # Rows of the result, up to which a scatter-add of many rows is made in parts; 0 for never. One
    # block of a GPU would own all of them: the gradient of T5's bias adds 2^18 rows to 32.
    few_scattered: int = 0
    many_scattered: int = 1 << 14  # rows that are added: chosen, fewer are little work
    # Rows of all parts together: chosen. A block owns 32 of them, so that an H200 has a few blocks
    # for each multiprocessor. 2^15 rows of 128 numbers added to 256 took 0.69 ms in one part.
    most_scattered: int = 1 << 14


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
    idle_spins: int = 30_000  # chosen: 0.4 to 1.5 ms between steps, before a thread sleeps


@dataclass(frozen=True, slots=True)
class Launching:
    """How steps are given to a GPU, and what its libraries are asked for (runtime/cuda)."""

    steps: int = 16  # in one launch, of a list of batches: Python is then no part of a step's time
    most_inputs: int = 64 << 20  # bytes of the inputs of steps that are one launch: chosen
    small_results: int = 1 << 16  # bytes that are copied back with every step: chosen
    ahead: int = 3  # launches that the host may be ahead: inputs are copied while the GPU computes
    graphs: int = 8  # of a slot, one for each set of arrays on the device: chosen
    result_blocks: int = 2  # of a result that stays on the device: a loop holds the last one
    # Kernels that are compiled together. Parts are compiled at the same time; each takes 40 ms for
    # what all share, and 24 kernels took longer than 24 times one (NVRTC 13.4, BERT's step).
    part_kernels: int = 6
    compilers: int = 4  # processes of the compiler that are begun before the first text: chosen
    part_text: int = 20_000  # characters: six merges of a sort have 75,000, and took 1.4 s for 0.3
    matmul_candidates: int = 32  # algorithms of cuBLASLt that are timed
    # Bytes: what NVIDIA recommends for chips of 9.0, and what PyTorch gives it there.
    matmul_workspace: int = 32 << 20
    # Plans of cuDNN that are timed: of 12 for each of 13 convolutions the first was the fastest.
    conv_plans: int = 3
    plan_workers: int = 6  # processes that plan grouped convolutions, at most: chosen
    worker_plans: int = 4  # plans for each of them: one takes 0.23 s, a process 2 s to be there
    conv_workspace: int = 1 << 30  # bytes: a plan that needs more is passed over


@dataclass(frozen=True, slots=True)
class Target:
    """What a machine can do, and sizes at which kernels are fused and cut for it."""

    name: str
    # What the machine can do. Passes ask these; none asks which machine it is.
    is_spmd: bool = False  # a thread for each element, in place of vectors and blocks in a cache
    has_launches: bool = False  # a kernel is a launch: dear, and shared by equal ones of a phase
    fuses_epilogues: bool = False  # a matmul adds its bias; parts are written into their whole
    fuses_column_sums: bool = False  # sums of columns are made by the kernel that makes the rows
    chooses_layouts: bool = False  # axes may lie in memory in another order than they are counted
    rematerializes: bool = False  # arithmetic is nearly free: values are recomputed from any tensor
    contracts: bool = False  # the compiler may round a product and a sum once, where it likes
    copies_operands: bool = True  # a matmul copies operands into panels, and may compute them there
    inlines_constants: bool = True  # a number is written into the code that reads it
    keeps_serial_apart: bool = False  # loops in order stay in kernels of their own
    has_attention: bool = False  # whether a library computes attention
    has_conv: bool = False  # whether one computes convolutions
    without: frozenset[Any] = frozenset()  # library calls that it said it has not
    is_small: bool = False  # launches cost more than the arithmetic: loops compute matmuls too
    least_rows: int = 8  # of fused kernels that had as many: something to share
    small: int = 4096  # elements: kernels that are smaller are not worth sharing
    most_statements: int = 120
    most_small_statements: int = 40  # of kernels that one thread (or block) runs
    cache: int = 3 << 20  # bytes that an iteration may write: what follows should find them near
    way: int = 4 << 10  # bytes from one line to the next that shares its place in the first cache
    ways: int = 8  # lines that such a place holds
    parts: int = 1 << 14  # elements from which a reduction is worth sharing out
    panels: int = 8 << 20  # bytes that matmuls of one kernel may read in each iteration
    few: int = 0  # elements, up to which kernels of few rows are fused on a GPU
    most_buffers: int = 1 << 20  # of a kernel
    least_logits: int = 1 << 20  # elements from which a head's logits are computed by chunks
    panel: int = 32  # columns of a matmul's tile, of four bytes: two vectors of the widest kind
    word: int = 1  # bytes that an element of a block's own memory takes at least
    fusion: Fusion = Fusion()
    reductions: Reductions = Reductions()
    materialization: Materialization = Materialization()
    recomputation: Recomputation = RECOMPUTATION
    matmuls: Matmuls = MATMULS
    streaming: Streaming = Streaming()
    mapping: Mapping | None = None  # none where a loop's iterations are a processor's
    rewriting: Rewriting = Rewriting()
    costs: Costs = CPU_COSTS
    tasks: Tasks = Tasks()
    arena: Arena = ARENA
    launching: Launching = Launching()

    def adds_together(self, dtype: DType) -> bool:
        """Whether threads add numbers to one element in one step, sums of a dtype being wider."""
        return self.mapping is not None and accumulator(dtype).name in self.mapping.adds_together

    def in_order(self) -> Target:
        """The target with sums whose order is the same each time."""
        if self.mapping is None:
            return self
        return replace(self, mapping=replace(self.mapping, adds_together=frozenset()))


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
    contracts=True,
    copies_operands=False,
    inlines_constants=False,
    keeps_serial_apart=True,
    least_rows=512,
    small=2048,
    cache=1 << 15,
    way=0,
    panels=1 << 40,
    few=1 << 16,
    most_buffers=60,
    rewriting=Rewriting(
        fuses_heads=True,
        streams_narrow_logits=True,
        blocks_attention=False,
        least_scores=1 << 28,  # 1 GiB: chosen, nothing was timed
        scatters_cheaply=False,
        # 2^27 indices to look at: ten times as many took 1.6 ms (850,000 updates of 50,000 rows).
        least_sorted=1 << 32,
        few_scattered=4096,
        least_arg=64,
        most_blocked_scan=1 << 14,
        scan_parts=1 << 17,
        scanned_row=4096,
    ),
    costs=GPU_COSTS,
    reductions=Reductions(counted=32),
    materialization=Materialization(reads_through_rows=True),
    recomputation=Recomputation(least_bytes=1 << 18),
    matmuls=Matmuls(by_library=True, busy_tiles=512),
    # Rows: matmuls of half as many are a little slower, more take more memory (measured, H200).
    streaming=Streaming(
        least_rows=2048, most_rows=8192, usual_rows=4096, usual_chunks=4, rows_multiple=8
    ),
    mapping=Mapping(),
)
# Sizes of NVIDIA's, but for what the hardware's definition says: warps of CDNA have 64 threads, and
# a block has 64 KB of shared memory. Nothing was timed.
AMD = replace(
    GPU,
    name="amd",
    mapping=Mapping(warp=64, shared_limit=64 << 10, staged=64 << 10, scans=False),
    rewriting=replace(GPU.rewriting, scanned_row=0),
)
