"""The source of a program: a module's text for each distinct kernel, and how it is launched.

A kernel's text does not say in which arena each of its buffers lies: `module` does, when that is
known. Bindings: group 0 has the arenas, group 1 a uniform buffer with where each buffer starts, in
words of four bytes: for each call of a launch as many as the kernel has buffers, up to whole vec4s.
"""

from __future__ import annotations

from treadle.base import dtypes
from treadle.codegen.wgsl import scalars
from treadle.codegen.wgsl.blocks import Blocks
from treadle.codegen.wgsl.matrices import Matrices
from treadle.codegen.wgsl.prelude import NEAREST, ROUNDED, called
from treadle.codegen.wgsl.render import Writer
from treadle.codegen.wgsl.scatter import Scatter
from treadle.codegen.wgsl.tiles import Contraction
from treadle.codegen.wgsl.values import Values
from treadle.kernel.geometry import Scattered, Tiled
from treadle.kernel.mapped import blocks_of, geometry_of
from treadle.kernel.nodes import Kernel, Matmul
from treadle.kernel.program import Program
from treadle.kernel.shaders import (
    AS_DEVICE,
    BY_DEVICE,
    FLOATS,
    HALVES,
    MOST_WORKGROUPS,
    PACKS,
    WORDS,
    Shader,
    module,
)
from treadle.kernel.traverse import walk


def render_program(program: Program, halves: bool = False) -> tuple[Shader, ...]:
    """Kernels numbered as `Program.distinct` numbers them; with `halves` float16 is two bytes."""
    return tuple(shader(kernel, halves) for kernel in program.distinct())


def shader(kernel: Kernel, halves: bool = False) -> Shader:
    narrow = frozenset(b.name for b in kernel.buffers if halves and b.dtype is dtypes.float16)
    lines = _written(kernel, narrow)
    seen = {n: PACKS if n in lines.packed else HALVES for n in narrow}
    seen |= dict.fromkeys(lines.floats, FLOATS)
    elements = tuple(seen.get(b.name, WORDS) for b in kernel.buffers) if seen else ()
    calls = geometry_of(kernel).calls
    return Shader(_text(kernel, lines), blocks_of(kernel), len(kernel.buffers), calls, elements)


def _written(kernel: Kernel, halves: frozenset[str]) -> Values:
    for b in (*kernel.buffers, *kernel.scratch):
        scalars.register(b.dtype)  # an error names what WGSL has not
    lines: Writer | Scatter
    match geometry_of(kernel).template:
        case Tiled() as tiled:
            lines = (Matrices if tiled.matrices else Contraction)(kernel, tiled, halves)
        case Scattered() as scattered:
            lines = Scatter(kernel, scattered, halves)
        case None:
            has_matrices = any(isinstance(s, Matmul) for s in walk(kernel.body))
            lines = (Blocks if has_matrices else Writer)(kernel, halves)
    lines.written()
    return lines


def _text(kernel: Kernel, lines: Values) -> str:
    geometry, blocks = geometry_of(kernel), blocks_of(kernel)
    vectors = max(1, -(-len(kernel.buffers) // 4))
    body = "\n".join(lines.lines)
    head = [
        f"@compute @workgroup_size({geometry.threads})",
        "fn main(@builtin(workgroup_id) group: vec3<u32>,",
        "        @builtin(num_workgroups) groups: vec3<u32>,",
        "        @builtin(local_invocation_index) local: u32) {",
        "  let index = i32(local);",
        "  let block = group.x + group.y * groups.x;",
    ]
    if blocks > MOST_WORKGROUPS:
        head.append(f"  if (block >= {blocks}u) {{ return; }}")
    shares = geometry.share if geometry.share > 1 else geometry.threads
    head.append(
        f"  let tid = index % {shares};" if shares < geometry.threads else "  let tid = index;"
    )
    head += [
        f"  let p{i} = arguments[group.z * {vectors}u + {i // 4}u][{i % 4}];"
        for i in range(len(kernel.buffers))
    ]
    room = f"array<vec4<u32>, {vectors * geometry.calls}>"
    enabled = ["enable f16;"] if lines.halves or "coop_mat" in body else []
    enabled += ["enable wgpu_cooperative_matrix;"] if "coop_mat" in body else []
    declared = [*enabled, f"@group(1) @binding(0) var<uniform> arguments: {room};", *lines.shared]
    functions = called(body)
    if lines.halves and ROUNDED in functions:  # as the device does it, where it does so rightly
        for first, quick in ((ROUNDED, BY_DEVICE), (NEAREST, "f16(x)")):
            quick = f"{first}\n  if ({AS_DEVICE}) {{ return {quick}; }}"
            functions = functions.replace(first, quick)
        declared.append(f"override {AS_DEVICE}: bool = false;")
    if "kept(" in body + functions:
        declared.append("var<private> zero: u32;")
        head.append("  zero = p0 >> 31u;")  # no arena has so many words
    return "\n".join([*declared, *([functions] if functions else []), *head, body, "}", ""])


def render_kernel(kernel: Kernel) -> str:
    """One kernel's module, its buffers in one arena."""
    return module(shader(kernel), [0] * len(kernel.buffers))
