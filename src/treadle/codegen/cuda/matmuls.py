"""A standalone matmul where no library computes it: square tiles in shared memory."""

from __future__ import annotations

from treadle.codegen.cuda import scalars
from treadle.kernel.index import Index, Var
from treadle.kernel.mapped import geometry_of
from treadle.kernel.nodes import Blocked, Kernel, Matrix, Multiply, whole_product


def matmul_lines(kernel: Kernel, blocked: Blocked) -> list[str]:
    """Lines of the function of a standalone matmul."""
    found = whole_product(kernel)
    assert found is not None
    loops, product = found
    tile = blocked.tile
    dtypes = {b.name: b.dtype for b in kernel.buffers}
    places = {b.name: f"p{i}" for i, b in enumerate(kernel.buffers)}
    m, n = product.target.rows.count, product.target.columns.count
    k = product.left.columns.count
    down, across = -(-m // tile), -(-n // tile)
    wide = scalars.register(dtypes[product.target.buffer])

    def at(matrix: Matrix, row: str, column: str) -> str:
        base = _place(matrix.index, loops)
        rows, columns = matrix.rows.stride, matrix.columns.stride
        return (
            f"{places[matrix.buffer]}[{base} + (i64)({row}) * {rows} + (i64)({column}) * {columns}]"
        )

    text = _BODY.format(
        tile=tile, depth=blocked.depth, each=blocked.each, threads=geometry_of(kernel).threads,
        m=m, n=n, k=k, wide=wide,
        tiles=down * across, across=across, decode=_decoded(loops),
        left=at(product.left, "row", "at"), right=at(product.right, "at", "column"),
        target=at(product.target, "row", "column"),
        sum=_sum(product, at(product.target, "row", "column"), wide, places),
    )  # fmt: skip
    return text.strip("\n").split("\n")


def _sum(product: Multiply, target: str, wide: str, places: dict[str, str]) -> str:
    found = "sums[i][j]"
    if product.bias is not None:
        found = f"({found} + get({places[product.bias]}[column]))"
    return f"({wide})(get({target}) + {found})" if product.adds else f"({wide}){found}"


def _place(index: Index, loops: tuple[Var, ...]) -> str:
    parts = [f"(i64)b{loops.index(v)} * {f}" for v, f in index.terms if isinstance(v, Var)]
    return " + ".join([*parts, str(index.offset)])


def _decoded(loops: tuple[Var, ...]) -> str:
    lines, rest = [], "batch"
    for i in range(len(loops) - 1, -1, -1):
        lines.append(f"  const int b{i} = {rest} % {loops[i].extent};")
        rest = f"({rest} / {loops[i].extent})"
    return "\n".join(lines)


_BODY = """
  const int batch = block / {tiles}, tile = block % {tiles};
{decode}
  const int first_row = tile / {across} * {tile}, first_column = tile % {across} * {tile};
  __shared__ {wide} lefts[{depth}][{tile} + 1], rights[{depth}][{tile} + 1];
  {wide} sums[{each}][{each}] = {{}};
  const int r = threadIdx.x / ({tile} / {each}) * {each};
  const int c = threadIdx.x % ({tile} / {each}) * {each};
  for (int start = 0; start < {k}; start += {depth}) {{
    for (int q = threadIdx.x; q < {tile} * {depth}; q += {threads}) {{
      const int i = q / {depth}, d = q % {depth}, row = first_row + i, at = start + d;
      lefts[d][i] = row < {m} && at < {k} ? ({wide})get({left}) : ({wide})0;
    }}
    for (int q = threadIdx.x; q < {tile} * {depth}; q += {threads}) {{
      const int d = q / {tile}, j = q % {tile}, column = first_column + j, at = start + d;
      rights[d][j] = column < {n} && at < {k} ? ({wide})get({right}) : ({wide})0;
    }}
    __syncthreads();
#pragma unroll
    for (int d = 0; d < {depth}; ++d)
#pragma unroll
      for (int i = 0; i < {each}; ++i)
#pragma unroll
        for (int j = 0; j < {each}; ++j)
          sums[i][j] = t_fma(lefts[d][r + i], rights[d][c + j], sums[i][j]);
    __syncthreads();
  }}
#pragma unroll
  for (int i = 0; i < {each}; ++i)
#pragma unroll
    for (int j = 0; j < {each}; ++j) {{
      const int row = first_row + r + i, column = first_column + c + j;
      if (row < {m} && column < {n}) put({target}, {sum});
    }}
"""
