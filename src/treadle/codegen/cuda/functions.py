"""What is around the lines of a kernel: its function, and the memory that its blocks share."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.codegen.cuda import scalars
from treadle.codegen.cuda.shape import Shape
from treadle.codegen.cuda.stages import Stages, own_numbers
from treadle.kernel.cost import padded
from treadle.kernel.nodes import Kernel


def function(
    kernel: Kernel, symbol: str, calls: int, block: int, body: Sequence[str], fewest: int = 1
) -> str:
    """The function around some lines: pointers from its one argument, by the call's number."""
    count = max(1, len(kernel.buffers))
    head = [
        f"struct {symbol}_args {{ void *p[{calls}][{count}]; }};",
        f'extern "C" __global__ void __launch_bounds__({block}{f", {fewest}" * (fewest > 1)}) '
        f"{symbol}(const __grid_constant__ {symbol}_args a) {{",
    ]
    head += ["  begin();", "  const int block = blockIdx.x;"]
    head += [
        f"  {qualifier}{scalars.memory(b.dtype)} *__restrict__ p{i} = "
        f"({qualifier}{scalars.memory(b.dtype)} *)now(a.p[blockIdx.y][{i}]);"
        for i, b in enumerate(kernel.buffers)
        for qualifier in ("const " if i < len(kernel.inputs) else "",)
    ]
    return "\n".join([*head, *body, "}"])


def part(kernel: Kernel, symbol: str, body: Sequence[str]) -> str:
    """The function as part of another, which says what block it is and where the pointers are.

    What it reads may have been written a moment ago: pointers promise nothing.
    """
    head = [f"DEV void {symbol}(const int block, void *const *p) {{"]
    for i, b in enumerate(kernel.buffers):
        type_ = scalars.memory(b.dtype)
        head.append(f"  {type_} *p{i} = ({type_} *)now(p[{i}]);")
    return "\n".join([*head, *body, "}"])


def shared_bytes(kernel: Kernel, shape: Shape, stages: Stages) -> int:
    """Shared memory that a block of a kernel needs for its teams' own buffers."""
    if shape.team == 1:
        return 0
    own = own_numbers(shape)
    scratch = sum(padded(b.nbytes) for b in kernel.scratch if b.name not in own)
    return shape.teams * (scratch + stages.shared)


def counts_far(kernel: Kernel, shape: Shape) -> bool:
    """Whether turns need 64 bits to count."""
    inner = max((b.size for b in (*kernel.buffers, *kernel.scratch)), default=0)
    inner = inner if shape.count == 1 else 0  # one turn may walk a whole buffer
    return max(inner, shape.count) + 4 * shape.block * shape.lanes >= 1 << 31
