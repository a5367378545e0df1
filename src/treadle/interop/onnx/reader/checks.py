"""What is wrong with a whole program, found before any of it is run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from treadle.interop.onnx.library import library
from treadle.interop.onnx.reader.calls import OPERATORS
from treadle.interop.onnx.reader.program import MOST_STEPS, Body, Program, Step
from treadle.interop.onnx.reader.tensors import Folder

LEAST_OPSET, MOST_OPSET = 13, 28
# Operators whose older definitions mean the same: later ones added element types, negative axes,
# attributes with neutral defaults, or operands in place of attributes that are read too. The number
# is the oldest definition that is read; those before broadcast otherwise, or were defined loosely.
SAME_SINCE = {
    **dict.fromkeys(("Cast", "Gather", "Identity", "If", "LRN", "Loop", "Conv"), 1),
    **dict.fromkeys(("ArgMax", "ArgMin", "DepthToSpace", "Flatten", "MatMul", "Shape", "Size"), 1),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax"), 1),
    **dict.fromkeys(("ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"), 1),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Slice", "Softmax", "SpaceToDepth", "Squeeze"), 1),
    **dict.fromkeys(("Transpose", "Unsqueeze"), 1),
    **dict.fromkeys(("LpPool", "Pad", "Split"), 2),
    "Concat": 4,
    "Reshape": 5,
    **dict.fromkeys(("Abs", "Ceil", "Exp", "Floor", "Log", "Neg", "Reciprocal", "Relu"), 6),
    **dict.fromkeys(("Clip", "Sigmoid", "Sqrt", "Tanh", "Tile"), 6),
    **dict.fromkeys(("Add", "Div", "Equal", "Gemm", "Greater", "Less", "Mul", "Pow", "Sub"), 7),
    **dict.fromkeys(("AveragePool", "BatchNormalization", "Dropout", "PRelu"), 7),
    **dict.fromkeys(("Expand", "Max", "MaxPool", "Mean", "Min", "Sum"), 8),
    **dict.fromkeys(("Compress", "Erf", "IsNaN", "MeanVarianceNormalization", "NonZero"), 9),
    **dict.fromkeys(("OneHot", "Scan", "Scatter", "Sign", "Upsample"), 9),
    **dict.fromkeys(("DequantizeLinear", "Mod", "QuantizeLinear", "TopK"), 10),
    **dict.fromkeys(("Constant", "GatherElements", "GatherND"), 11),
    **dict.fromkeys(("ScatterElements", "ScatterND"), 11),
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), 12),
}


def all_steps(body: Body) -> Iterator[Step]:
    """The steps of a body, and of the bodies inside them."""
    stack = [body]
    while stack:
        for step in stack.pop().steps:
            yield step
            stack += step.bodies()


def check(program: Program, folder: Folder) -> None:
    """Refuses operators that are not known, all at once; cycles of functions; too many steps."""
    bodies = [program.body, *program.functions.values()]
    _check_operators(program, bodies, folder)
    _check_size(program, folder)
    for body in bodies:
        _check_names(body, folder)


def _check_operators(program: Program, bodies: list[Body], folder: Folder) -> None:
    unknown, old = set(), set()
    for body in bodies:
        for step in all_steps(body):
            if (step.domain, step.op) in program.functions and step.op not in OPERATORS:
                continue
            if step.domain and (step.domain, step.op) in program.functions:
                continue
            if step.domain or step.op not in OPERATORS:
                unknown.add(step.title[:80])
            elif not _is_covered(step.op, program.opset):
                old.add(step.op)
    if unknown:
        names = sorted(unknown)
        more = f" and {len(names) - 50} more" if len(names) > 50 else ""
        cause = f"{len(names)} operators are not imported: {', '.join(names[:50])}{more}"
        raise folder.refuse(cause, "docs/onnx.md lists those that are.")
    if old:
        cause = f"opset {program.opset} has other definitions of {', '.join(sorted(old)[:50])}"
        remedy = f"Convert it to one of {LEAST_OPSET} to {MOST_OPSET}: onnx.version_converter."
        raise folder.refuse(cause, remedy)


@cache
def _is_covered(op: str, opset: int) -> bool:
    """Whether an operator is in this opset what it is in some that is read."""
    defs = library().defs
    if opset > defs.onnx_opset_version() or opset < 1:
        return False
    try:
        schema = defs.get_schema(op, opset)
        if schema.deprecated:
            return False
        version = schema.since_version
        if opset >= LEAST_OPSET:
            return opset <= MOST_OPSET or version <= MOST_OPSET
        least = defs.get_schema(op, LEAST_OPSET).since_version
        return version >= min(SAME_SINCE.get(op, least), least)
    except defs.SchemaError:  # it came later
        return False


def _check_size(program: Program, folder: Folder) -> None:
    """Steps with those of functions where they are called, and no function that calls itself."""
    sizes: dict[tuple[str, str], int | None] = {}

    def total(body: Body, depth: int) -> int:
        count = 0
        for step in all_steps(body):
            count += 1
            key = (step.domain, step.op)
            if key not in program.functions or (not step.domain and step.op in OPERATORS):
                continue
            if key not in sizes:
                sizes[key] = None  # while it is being counted
                sizes[key] = total(program.functions[key], depth + 1)
            found = sizes[key]
            if found is None or depth > 100:
                raise folder.refuse(f"the function {step.title[:80]} calls itself")
            count += found
        return count

    if total(program.body, 0) > MOST_STEPS:
        raise folder.refuse(f"with its functions it has more than {MOST_STEPS:,} steps")


def _check_names(body: Body, folder: Folder, around: tuple[set[str], ...] = ()) -> None:
    """Each name is given once, and before it is read; a body sees those of the bodies around it.

    Bodies are checked where their step is reached, when the sets around them have just what was
    given before: nothing is copied. The reader bounds how deep they are.
    """
    seen = {*(p.name for p in body.inputs), *body.constants}
    scopes = (*around, seen)
    if len(seen) != len(body.inputs) + len(body.constants):
        raise folder.refuse("two inputs have one name")
    for step in body.steps:
        missing = [n for n in step.inputs if n and not any(n in scope for scope in scopes)]
        if missing:
            cause = f"{step.title[:80]} reads {missing[0][:80]!r} before anything gives it"
            raise folder.refuse(cause, "Nodes must be sorted, and may not be in a circle.")
        for inner in step.bodies():
            _check_names(inner, folder, scopes)
        again = [n for n in step.outputs if n and n in seen]
        if again:
            raise folder.refuse(f"two nodes give {again[0][:80]!r}")
        seen.update(n for n in step.outputs if n)
    absent = [p.name for p in body.outputs if not any(p.name in scope for scope in scopes)]
    if absent:
        raise folder.refuse(f"nothing gives the output {absent[0][:80]!r}")
