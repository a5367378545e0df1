"""The size and shape of the compiler's back half (schedule, codegen, kernel) in numbers.

usage: python tools/measure_source.py [--list]

lines      of all files
tokens     a line of code, by `tokenize`, comments left out
function   lines of the median function
walkers    functions that recurse over statements or values of the loop IR by hand, beside those of
           kernel/traverse.py
constants  numbers at module level, beside targets, coefficients and the bits of floats
is_gpu     uses outside kernel/target.py
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "treadle"
FOLDERS = ("schedule", "codegen", "kernel")
TARGETS = ("kernel/target.py", "kernel/machine.py")
FORMATS = ("codegen/llvm/mathematics.py", "codegen/llvm/halves.py")  # coefficients, bits of floats
TRAVERSAL = "kernel/traverse.py"
NODES = frozenset("For Let Set Accumulate Store Apply Convert Guarded Load Statement Value".split())
QUIET = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A file of the back half."""

    name: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def functions(self) -> Iterator[Function]:
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield node


def modules() -> list[Module]:
    paths = sorted(p for folder in FOLDERS for p in (SOURCE / folder).rglob("*.py"))
    return [Module(str(p.relative_to(SOURCE)), p.read_text()) for p in paths]


def lines(found: list[Module]) -> int:
    return sum(len(m.text.splitlines()) for m in found)


def tokens_a_line(found: list[Module]) -> float:
    """Tokens over the lines in which one begins; a docstring is one token."""
    tokens, begun = 0, 0
    for module in found:
        rows = [
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(module.text).readline)
            if token.type not in QUIET and token.string
        ]
        tokens += len(rows)
        begun += len(set(rows))
    return tokens / begun


def function_median(found: list[Module]) -> float:
    """Lines of code in a function, its docstring and signature included."""
    sizes = [(f.end_lineno or f.lineno) - f.lineno + 1 for m in found for f in m.functions()]
    return statistics.median(sizes)


def walkers(found: list[Module]) -> list[str]:
    named: list[str] = []
    for module in found:
        if module.name == TRAVERSAL:
            continue
        for function in module.functions():
            if recurses(function) and mentions_nodes(function):
                named.append(f"{module.name}:{function.lineno} {function.name}")
    return named


def recurses(function: Function) -> bool:
    """Whether a function uses its own name, called or handed to `map`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == function.name:
            return True
        is_own = isinstance(node, ast.Attribute) and node.attr == function.name
        if is_own and isinstance(node.value, ast.Name) and node.value.id == "self":
            return True
    return False


def mentions_nodes(function: Function) -> bool:
    return any(isinstance(n, ast.Name) and n.id in NODES for n in ast.walk(function))


def constants(found: list[Module]) -> list[str]:
    named: list[str] = []
    for module in found:
        if module.name in (*TARGETS, *FORMATS):
            continue
        for node in module.tree.body:
            if isinstance(node, ast.Assign) and is_number(node.value):
                text = ", ".join(ast.unparse(t) for t in node.targets)
                if text.upper() == text and not text.startswith("_"):
                    named.append(f"{module.name}:{node.lineno} {ast.unparse(node)}")
    return named


def is_number(value: ast.expr) -> bool:
    """Whether an expression is arithmetic on numbers, or a tuple of such."""
    if isinstance(value, ast.Tuple):
        return bool(value.elts) and all(map(is_number, value.elts))
    leaves = [n for n in ast.walk(value) if not isinstance(n, (ast.operator, ast.unaryop))]
    is_plain = all(isinstance(n, (ast.Constant, ast.BinOp, ast.UnaryOp)) for n in leaves)
    return is_plain and all(
        isinstance(n.value, (int, float)) and not isinstance(n.value, bool)
        for n in leaves
        if isinstance(n, ast.Constant)
    )


def uses_of_is_gpu(found: list[Module]) -> list[str]:
    return [
        f"{m.name}:{i}"
        for m in found
        if m.name not in TARGETS
        for i, line in enumerate(m.text.splitlines(), 1)
        if "is_gpu" in line
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name what is counted")
    given = parser.parse_args()
    found = modules()
    print(f"lines      {lines(found):,}")
    for folder in FOLDERS:
        own = [m for m in found if m.name.startswith(f"{folder}/")]
        print(f"  {folder:<9}{lines(own):,}")
    print(f"tokens     {tokens_a_line(found):.2f}")
    print(f"function   {function_median(found):g}")
    lists = {"walkers": walkers, "constants": constants, "is_gpu": uses_of_is_gpu}
    for title, count in lists.items():
        named = count(found)
        print(f"{title:<11}{len(named)}")
        if given.list:
            print(*(f"  {name}" for name in named), sep="\n")


if __name__ == "__main__":
    main()
