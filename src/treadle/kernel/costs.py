"""What equal graphs are compared by: a target's part that the e-graph asks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """Picoseconds by which equal graphs are compared (egraph): rough, only differences count.

    Values are a core's with AVX-512 (bench/ceilings.py: 90 GFLOP/s, 10 GB/s).
    """

    flop: float = 11.0  # of a contraction
    narrow_flop: float = 11.0  # of one whose operands have two bytes
    byte: float = 100.0  # to or from memory
    element: float = 20.0  # of an op inside a kernel, 16 lanes at 3 GHz
    launch: float = 0.0  # of a kernel; a processor's are fused, and calls are cheap
    units: int = 0  # that share the tiles of a matmul; 0 where a matmul of any size keeps all busy
    split: int = 1024  # terms of a sum that a library gives to one of them: chosen
    # Parts of a step's cost that rewriting saves at least, a move and all together: less is lost
    # in what is not counted. Steps with 0.1 to 0.5 % less were not faster, and with 1.1 to 1.8 %
    # less their programs were not leaner, for a second of scheduling both (bench/rules.py, H200).
    least_move: float = 1e-4
    least_gain: float = 0.03
    # The part that a whole program saves at least if it makes more calls or moves more bytes: on an
    # H200 a step that saved 1.6 % by count and moved more took 2.3 % longer (bench/rules.py).
    clear_gain: float = 0.03


CPU_COSTS = Costs()
# An H200: 4.8 TB/s of which a copy reaches 3.5, matmuls of float32 40 and of bfloat16 600 TFLOP/s,
# an edge of a CUDA graph 1 to 3 µs (docs/cuda.md).
GPU_COSTS = Costs(flop=0.025, narrow_flop=0.0017, byte=0.29, element=0.01, launch=2e6, units=132)
