"""Calls of a library beside the oracle: what each must compute, on random inputs.

Kernels are compared with the graph exactly; what is inside a library nobody can see. Its calls are
run once on numbers that are drawn here, and some of what they give is compared with the float64
oracle, as near as the contract of the op allows. What was measured is part of the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from treadle.base import dtypes
from treadle.base.dtypes import DType, accumulator
from treadle.base.errors import GraphError
from treadle.domains.float64 import Float64
from treadle.ir import composites as c
from treadle.ir.contract import SumError
from treadle.ir.graph import Graph, GraphBuilder, Output, OutputKind
from treadle.ir.op import OPS, Attributes
from treadle.ir.ops.leaves import INPUT, Leaf
from treadle.ir.ops.linear import CONTRACT
from treadle.ir.types import TensorType
from treadle.kernel.claims import Claim
from treadle.kernel.launch import LibraryLaunch, MatmulCall, MatrixFacts, Tensor
from treadle.verify.bounds import Run, careful_spread, over, spread, ulp

Buffers = list[np.ndarray]  # flat, of a call's arguments
Compute = Callable[[Buffers], Buffers]  # the call itself: what is in its buffers afterwards
SOME = 12  # rows and columns of a matmul that are compared, beside the first and the last
LARGE = 2**22  # multiplications of a convolution's sample, and scores of attention's


@dataclass(frozen=True)
class Measured:
    """How far from the oracle what was compared is, and how far it may be."""

    elements: int
    deviation: float  # the greatest
    share: float  # of what is allowed there, the greatest
    wrong: str = ""

    def with_other(self, other: Measured) -> Measured:
        return Measured(
            self.elements + other.elements,
            max(self.deviation, other.deviation),
            max(self.share, other.share),
            self.wrong or other.wrong,
        )


def attest(call: MatmulCall | LibraryLaunch, compute: Compute, name: str, seed: int = 0) -> Claim:
    """A call run on random inputs; a GraphError if it is not what the op is."""
    rng = np.random.default_rng(seed)
    if isinstance(call, MatmulCall):
        title, found = "matmul", _matmul(call, compute, rng)
    else:
        title, found = call.name, _called(call, compute, rng)
    if found.wrong:
        raise GraphError(
            "verify",
            f"the library's {title} ({name}) is not what the op is: {found.wrong}",
            'Use another version of the library, or device="cpu", and please report it.',
        )
    facts = {
        "elements": float(found.elements),
        "deviation": found.deviation,
        "share of what is allowed": found.share,
    }
    return Claim("library", name, spec=_spec(call), measured=facts)


def _spec(call: MatmulCall | LibraryLaunch) -> str:
    """What is called, in a line."""
    if isinstance(call, MatmulCall):
        bias = " + bias" if call.bias >= 0 else ""
        more = f", {call.batch} at a time" if call.batch > 1 else ""
        kinds = f"{call.left.dtype}, {call.right.dtype} to {call.target.dtype}"
        return f"({call.m}, {call.k}) · ({call.k}, {call.n}){bias} of {kinds}{more}"
    shapes = ", ".join(f"{t.dtype}{list(t.shape)}" for t in call.operands)
    numbers = ", ".join(f"{k} {v:g}" for k, v in call.numbers)
    return f"{call.name}({shapes}; {numbers})"


def compared(ours: np.ndarray, exact: np.ndarray, allowed: np.ndarray) -> Measured:
    """Where both are finite; what one of them is not, the other must not be either."""
    wide = ours.astype(np.float64)
    finite = np.isfinite(exact)
    same = (wide == exact) | (np.isnan(wide) & np.isnan(exact))
    with np.errstate(all="ignore"):
        apart = np.where(finite, np.abs(wide - exact), np.where(same, 0.0, np.inf))
        share = np.where(apart == 0, 0.0, apart / np.maximum(allowed, 1e-300))
    apart, share = (np.where(np.isnan(x), np.inf, x) for x in (apart, share))
    if not exact.size:
        return Measured(0, 0.0, 0.0)
    worst = np.unravel_index(int(np.argmax(share)), share.shape)
    told = f"{wide[worst]:.6g} where the oracle has {exact[worst]:.6g}, {allowed[worst]:.2g} off"
    wrong = "" if share[worst] <= 1 else f"{told} is allowed"
    return Measured(int(exact.size), float(apart.max()), float(share[worst]), wrong)


def _drawn(dtype: str, size: int, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(size).astype(dtypes.EVERY[dtype].numpy)


# Matmuls


def _matmul(call: MatmulCall, compute: Compute, rng: np.random.Generator) -> Measured:
    """Some rows and columns of the first and the last of a batch."""
    sizes = {
        "target": (call.target, call.m, call.n),
        "left": (call.left, call.m, call.k),
        "right": (call.right, call.k, call.n),
    }
    arrays = {
        n: _drawn(f.dtype, _reach(f, a, b, call.batch), rng) for n, (f, a, b) in sizes.items()
    }
    bias = _drawn(call.target.dtype, call.n, rng) if call.bias >= 0 else None
    scales = [np.array([s], np.float32) for s in rng.uniform(0.5, 2.0, len(call.scales))]
    given = [arrays["left"], arrays["right"], *([] if bias is None else [bias]), *scales]
    done = compute([a.copy() for a in (*given, arrays["target"])])[-1]
    rows, columns = _picked(call.m, rng), _picked(call.n, rng)
    found = Measured(0, 0.0, 0.0)
    for b in sorted({0, call.batch - 1}):
        left = _block(arrays["left"], call.left, b, rows, np.arange(call.k))
        right = _block(arrays["right"], call.right, b, np.arange(call.k), columns)
        old = _block(arrays["target"], call.target, b, rows, columns) * float(call.adds)
        factor = float(np.prod([s[0] for s in scales], dtype=np.float64))
        exact = left @ right * factor + old + (0.0 if bias is None else _wide(bias)[columns])
        sizes_ = np.abs(left) @ np.abs(right) * factor + np.abs(old)
        ours = _block(done, call.target, b, rows, columns)
        allowed = _allowed(call, exact, sizes_, bias is not None)
        found = found.with_other(compared(ours, exact, allowed))
    return found


def _allowed(call: MatmulCall, exact: np.ndarray, sizes: np.ndarray, has_bias: bool) -> np.ndarray:
    """As the contract of contractions: of the terms' sizes, and the last roundings."""
    error, dtype = CONTRACT.contract.error, dtypes.EVERY[call.target.dtype]
    assert isinstance(error, SumError)
    unit = accumulator(dtypes.EVERY[call.left.dtype]).unit_roundoff
    own = error.factor * call.k * unit * sizes
    return np.asarray(own + (2 if has_bias or call.adds else 1) * ulp(exact, dtype))


def _reach(facts: MatrixFacts, m: int, n: int, batch: int) -> int:
    last = (m - 1) * facts.rows + (n - 1) * facts.columns + (batch - 1) * facts.batch
    return facts.start + last + 1


def _block(
    array: np.ndarray, facts: MatrixFacts, b: int, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """Some rows and columns of a matrix of a batch, as float64."""
    at = facts.start + b * facts.batch + rows[:, None] * facts.rows + columns * facts.columns
    return _wide(array[at])


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def _picked(count: int, rng: np.random.Generator) -> np.ndarray:
    return np.unique([0, count - 1, *rng.integers(0, count, SOME)])


# Attention and convolutions


def _called(call: LibraryLaunch, compute: Compute, rng: np.random.Generator) -> Measured:
    """A sample of what a composite gives, beside its definition on the same sample."""
    tensors = (*call.operands, *call.results)
    buffers = [np.zeros(0)] * (1 + max(t.argument for t in tensors))
    for argument in range(len(buffers)):
        own = [t for t in tensors if t.argument == argument]
        size = max((_end(t) for t in own), default=1)
        buffers[argument] = _drawn(own[0].dtype if own else "float32", size, rng)
    picks = _picks(call)
    operands = [_view(buffers[t.argument], t) for t in call.operands]
    if call.name == c.ATTENTION_GRAD.name:
        _fill_forward(call, operands, picks)
    taken = [_part(call, t, picks, _wide(x)) for t, x in zip(call.operands, operands, strict=True)]
    done = compute([b.copy() for b in buffers])
    parts = [_part(call, t, picks, _view(done[t.argument], t)) for t in call.results]
    graph = _definition(call, [x.shape for x in taken], [x.shape for x in parts])
    inputs = {str(i): x for i, x in enumerate(taken)}
    found = Measured(0, 0.0, 0.0)
    run = over(graph, inputs)
    exact = run(Float64())
    for bounds in (spread, careful_spread):
        allowed = bounds(run, graph.output_types)
        found = Measured(0, 0.0, 0.0)
        for ours, theirs, most in zip(parts, exact, allowed, strict=False):
            found = found.with_other(compared(ours, theirs, most))
        if not found.wrong:
            break
    return found


def _end(tensor: Tensor) -> int:
    steps = zip(tensor.shape, tensor.strides, strict=True)
    return tensor.start + sum((n - 1) * step for n, step in steps) + 1


def _view(buffer: np.ndarray, tensor: Tensor) -> np.ndarray:
    steps = tuple(s * buffer.itemsize for s in tensor.strides)
    return np.lib.stride_tricks.as_strided(buffer[tensor.start :], tensor.shape, steps)


Picks = dict[str, slice]  # of axes by what they are


def _picks(call: LibraryLaunch) -> Picks:
    """Which part is compared: the last of a batch, of groups of heads, of output channels."""
    first, second = call.operands[0].shape, call.operands[1].shape
    if "conv" not in call.name:
        q, k = _queries_and_keys(call)
        scores = q[2] * k[2] * q[1] // k[1]
        count = max(1, min(q[0], LARGE // max(1, 4 * scores)))
        is_summed = len(call.results) > 3  # the gradient of a bias: over all that share it
        batch = slice(0, None) if is_summed else slice(q[0] - count, None)
        groups = slice(0, None) if is_summed or count > 1 else slice(k[1] - 1, None)
        each = q[1] // k[1]
        heads = slice(0, None) if groups.start == 0 else slice((k[1] - 1) * each, None)
        return {"batch": batch, "groups": groups, "heads": heads}
    result = call.results[0].shape
    work = int(np.prod(first, dtype=np.int64)) * int(np.prod(second[1:], dtype=np.int64))
    if call.name == c.CONV_GRAD_W.name:
        work = int(np.prod(first, dtype=np.int64)) * int(np.prod(result[1:], dtype=np.int64))
        count = max(1, min(result[0], first[1] * LARGE // max(1, work)))
        has_groups = second[1] != result[1]
        return {"out": slice(0, None) if has_groups else slice(result[0] - count, None)}
    count = max(1, min(first[0], first[0] * LARGE // max(1, work)))
    return {"batch": slice(first[0] - count, None)}


def _queries_and_keys(call: LibraryLaunch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    at = 3 if call.name == c.ATTENTION_GRAD.name else 0
    return call.operands[at].shape, call.operands[at + 1].shape


def _part(call: LibraryLaunch, tensor: Tensor, picks: Picks, array: np.ndarray) -> np.ndarray:
    """The part of a tensor that belongs to what is compared; an axis of one element stays."""

    def along(axis: int, pick: slice) -> None:
        nonlocal array
        if tensor.shape[axis] > 1:
            array = array[(slice(None),) * axis + (pick,)]

    if "conv" not in call.name:
        _, keys = _queries_and_keys(call)
        is_grouped = len(tensor.shape) == 4 and tensor.shape[1] == keys[1]
        along(0, picks["batch"])
        along(1, picks["groups" if is_grouped else "heads"])
        return array
    if "out" in picks:
        if tensor is call.results[0]:
            along(0, picks["out"])
        elif tensor is call.operands[0]:
            along(1, picks["out"])
        return array
    is_weight = tensor is call.operands[1]
    if not is_weight:
        along(0, picks["batch"])
    return array


def _fill_forward(call: LibraryLaunch, operands: Sequence[np.ndarray], picks: Picks) -> None:
    """The gradient is given the results of the forward pass: the oracle's, rounded."""
    names = ("ct", "out", "stats", "q", "k", "v", "bias")
    tensors = dict(zip(names, call.operands, strict=False))
    arrays = dict(zip(names, operands, strict=False))
    given = [n for n in ("q", "k", "v", "bias") if n in tensors]
    parts = [_part(call, tensors[n], picks, _wide(arrays[n])) for n in given]
    types = [TensorType(p.shape, _dtype(tensors[n])) for n, p in zip(given, parts, strict=True)]
    graph = _graph(c.ATTENTION.name, _attention(call), types)
    out, stats = over(graph, {str(i): p for i, p in enumerate(parts)})(Float64())
    for name, made in (("out", out), ("stats", stats)):
        into = _part(call, tensors[name], picks, arrays[name])
        into[...] = made.reshape(into.shape).astype(into.dtype)


def _dtype(tensor: Tensor) -> DType:
    return dtypes.EVERY[tensor.dtype]


def _attention(call: LibraryLaunch) -> c.Attention:
    numbers = dict(call.numbers)
    return c.Attention(numbers["scale"], bool(numbers["causal"]))


def _definition(
    call: LibraryLaunch, shapes: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> Graph:
    """A graph of the op that a library's call stands for, of the sizes that are compared."""
    types = [TensorType(s, _dtype(t)) for s, t in zip(shapes, call.operands, strict=True)]
    if "conv" not in call.name:
        if call.name == c.ATTENTION_GRAD.name:  # the logarithms of sums, of each query
            types[2] = types[2].with_shape(types[2].shape[:3])
        return _graph(call.name, _attention(call), types)
    numbers = dict(call.numbers)
    rank = len(shapes[0]) - 2
    of = {n: tuple(int(numbers[f"{n}{i}"]) for i in range(rank)) for n in _CONV}
    weight = results[0] if call.name == c.CONV_GRAD_W.name else shapes[1]
    image = shapes[1] if call.name == c.CONV_GRAD_W.name else shapes[0]
    image = results[0] if call.name == c.CONV_GRAD_X.name else image
    padding = tuple(zip(of["low"], of["high"], strict=True))
    conv = c.Conv(of["stride"], padding, of["dilation"], image[1] // weight[1])
    is_forward = call.name == c.CONV.name
    return _graph(call.name, conv if is_forward else c.ConvGrad(conv, results[0]), types)


_CONV = ("stride", "low", "high", "dilation")


def _graph(name: str, attributes: Attributes, types: Sequence[TensorType]) -> Graph:
    builder = GraphBuilder()
    inputs = [builder.add(INPUT, Leaf(str(i), t), ())[0] for i, t in enumerate(types)]
    values = builder.add(OPS[name], attributes, inputs)
    made = [Output(OutputKind.RESULT, str(i), v) for i, v in enumerate(values)]
    return builder.build(made, name)


__all__ = ["Measured", "Run", "attest", "compared"]
