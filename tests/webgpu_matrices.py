"""Cooperative matrices by ordinary WGSL, so that adapters without them run the same text.

Every thread has the whole of a matrix that its warp shares, and computes all of it. Threads wait
for each other before a matrix is stored: where there are cooperative ones, a warp stores at once.
"""

from __future__ import annotations

import re
from dataclasses import replace

from treadle.kernel.shaders import PACKS, Shader

EDGE, SIZE = 16, 256
_PLACE = r"&(\w+)\[(.*)\], (\d+)u\)"
_LOAD = re.compile(rf"(?:let|var) (\w+) = coopLoad(T?)<coop_mat16x16<f\d+, [ABC]>>\({_PLACE};")
_STORE = re.compile(rf"coopStoreT\((\w+), {_PLACE};")
_CLEAR = re.compile(r"var (\w+) = coop_mat16x16<f32, C>\(\);")
_ADD = re.compile(r"(\w+) = coopMultiplyAdd\((\w+), (\w+), (\w+)\);")
_LOOPS = f"  for (var i = 0; i < {EDGE}; i++) {{ for (var j = 0; j < {EDGE}; j++) {{\n    "
_HELPERS = """
fn matrix_clear(to: i32) { for (var i = 0; i < 256; i++) { matrices[to + i] = 0.0f; } }
fn matrix_add(a: i32, b: i32, c: i32) {
  for (var i = 0; i < 16; i++) { for (var j = 0; j < 16; j++) {
    var total = matrices[c + i * 16 + j];
    for (var k = 0; k < 16; k++) {
      total += matrices[a + i * 16 + k] * matrices[b + k * 16 + j];
    }
    matrices[c + i * 16 + j] = total;
  } }
}
"""


class _Matrices:
    """Matrices by name as parts of one array that each thread has."""

    def __init__(self, shader: Shader):
        self.slots: dict[str, int] = {}
        self.functions: dict[str, str] = {}
        self.packed = set(re.findall(r"var<workgroup> (\w+): array<vec4<f16>", shader.text))
        self.packed |= {f"memory{i}" for i, e in enumerate(shader.elements) if e == PACKS}

    def slot(self, name: str) -> int:
        return SIZE * self.slots.setdefault(name, len(self.slots))

    def at(self, buffer: str, is_by_rows: bool) -> str:
        far, near = ("i", "j") if is_by_rows else ("j", "i")
        if buffer in self.packed:
            return f"{buffer}[start + {far} * step + {near} / 4][{near} % 4]"
        return f"{buffer}[start + {far} * step + {near}]"

    def load(self, found: re.Match[str]) -> str:
        into, transposed, buffer, start, step = found.groups()
        name = f"matrix_load{transposed}_{buffer}"
        element = self.at(buffer, bool(transposed))
        body = f"{_LOOPS}matrices[to + i * {EDGE} + j] = f32({element});"
        self.functions[name] = f"fn {name}(to: i32, start: i32, step: i32) {{\n{body}\n}} }} }}\n"
        return f"{name}({self.slot(into)}, i32({start}), {step});"

    def store(self, found: re.Match[str]) -> str:
        value, buffer, start, step = found.groups()
        name = f"matrix_store_{buffer}"
        body = f"{_LOOPS}{self.at(buffer, True)} = matrices[held + i * {EDGE} + j];"
        self.functions[name] = f"fn {name}(held: i32, start: i32, step: i32) {{\n{body}\n}} }} }}\n"
        return f"workgroupBarrier();\n{name}({self.slot(value)}, i32({start}), {step});"

    def add(self, found: re.Match[str]) -> str:
        total, a, b, c = found.groups()
        assert total == c, "a matrix is added to itself"
        return f"matrix_add({self.slot(a)}, {self.slot(b)}, {self.slot(c)});"


def emulated(shader: Shader) -> Shader:
    """The shader without cooperative matrices; itself where it has none."""
    if "coop_mat" not in shader.text:
        return shader
    made, text = _Matrices(shader), shader.text
    text = text.replace("enable wgpu_cooperative_matrix;\n", "")
    text = _CLEAR.sub(lambda found: f"matrix_clear({made.slot(found[1])});", text)
    for pattern, meaning in ((_LOAD, made.load), (_STORE, made.store), (_ADD, made.add)):
        text = pattern.sub(meaning, text)
    assert "coop" not in text, "something of a matrix is left"
    slots = f"var<private> matrices: array<f32, {SIZE * len(made.slots)}>;"
    head, main, rest = text.partition("@compute")
    return replace(shader, text="".join([head, slots, _HELPERS, *made.functions.values(), main, rest]))
