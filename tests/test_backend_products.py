"""Products and convolutions compiled: any labels, sizes, layouts and dtypes, with their gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle as td
from backend import AGREE, Built, assert_within, build, draw, same_bits
from treadle.autodiff.backward import differentiate
from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.codegen.llvm.driver import render_program
from treadle.frontend.functions.linear import contract
from treadle.ir.graph import Graph
from treadle.ir.types import TensorType
from treadle.kernel import cost
from treadle.kernel.index import Var
from treadle.kernel.machine import Machine
from treadle.kernel.nodes import For, Matmul, Statement
from treadle.kernel.target import CPU
from treadle.schedule.fuse import matmuls_in
from treadle.schedule.panels import full_group
from treadle.schedule.schedule import schedule

NUMBERS = [1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 19, 31, 32, 33, 37, 47, 64, 65, 70]
MOST = 1 << 18  # multiplications of an example


def checked(graph: Graph, seed: int, agree: float = AGREE, threads: int = 3) -> Built:
    """A graph compiled, within its contracts of the oracle, the same on several threads."""
    arrays = draw(graph, seed)
    built = build(graph, shared=True)
    found = built.on(1).run(arrays)
    assert_within(graph, arrays, found, agree)
    assert same_bits(built.on(threads).run(arrays), found)
    return built


def linear(rows: int, inputs: int, outputs: int) -> Graph:
    """x wᵀ, as a layer has it: the right operand is turned over."""
    types = (
        TensorType((rows, inputs), dtypes.float32),
        TensorType((outputs, inputs), dtypes.float32),
    )
    return td.trace(lambda x, w: [x @ w.T], *types)


def text_of(graph: Graph, width: int) -> str:
    return render_program(schedule(graph, panel=2 * width), Machine(width))


@pytest.mark.parametrize(("depth", "square"), [(784, 16), (72, 8), (40, 8)])
def test_operands_are_turned_over_in_squares(depth: int, square: int) -> None:
    graph = linear(160, depth, 256)
    text = text_of(graph, 16)
    assert f"shufflevector <{square} x float>" in text
    checked(graph, depth)


def test_large_right_operands_are_fetched_ahead() -> None:
    large, small = linear(640, 1024, 1024), linear(640, 256, 256)
    assert "llvm.prefetch" in text_of(large, 16)
    assert "llvm.prefetch" not in text_of(small, 16)
    checked(large, 3)


def own_panels(graph: Graph) -> list[int]:
    """How many groups of panels threads copy for themselves; 0 where one copies for all."""
    found = []
    for kernel in schedule(graph).distinct():
        scratch = {b.name for b in kernel.scratch}
        for product in matmuls_in(kernel.body):
            is_own = product.right.buffer in scratch
            found.append(cost.iterations(kernel) if is_own else 0)
    return found


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "expected"),
    [
        (64, 512, 256, [8]),
        (9, 96, 512, [8]),
        (128, 784, 128, [4]),
        (128, 784, 136, [0, 0]),  # the last panel would be another
        (640, 512, 256, [0]),  # too many rows
        (3, 40, 256, [0]),  # too little work
    ],
)
def test_few_rows_share_panels(rows: int, inputs: int, outputs: int, expected: list[int]) -> None:
    graph = linear(rows, inputs, outputs)
    assert own_panels(graph) == expected
    checked(graph, rows)


@pytest.mark.parametrize(("rows", "is_copied"), [(1, False), (2, False), (3, True)])
def test_weights_are_not_copied_for_a_row(rows: int, is_copied: bool) -> None:
    """A token's products: copying the weights would be three times their reading."""
    graph = linear(rows, 100, 70)
    names = [k.name for k in schedule(graph).distinct()]
    assert any(n.endswith("_pack") for n in names) == is_copied
    checked(graph, rows)


def test_few_rows_as_they_lie_share_panels() -> None:
    """Not turned over, and of what is computed: the left operand counts as well."""
    x, w = TensorType((160, 1024), dtypes.float32), TensorType((1024, 1024), dtypes.float32)
    assert own_panels(td.trace(lambda x, w: [x @ w], x, w)) == [8]
    assert own_panels(td.trace(lambda x, w: [td.relu(x) @ w], x, w)) == [0]
    few = TensorType((130, 2048), dtypes.float32), TensorType((2048, 1024), dtypes.float32)
    assert own_panels(td.trace(lambda x, w: [x @ w], *few)) == [0], "deeper than a cache has room"
    checked(td.trace(lambda x, w: [x @ w], x, w), 4)


def test_turns_of_a_scan_do_not_copy_their_weights() -> None:
    """Those are copied once, before."""

    def rolled(x, w):
        return [td.scan(lambda c, r: (td.tanh(c @ w.T + r), c), x[0], x)[0]]

    types = TensorType((5, 32, 256), dtypes.float32), TensorType((256, 256), dtypes.float32)
    graph = td.trace(rolled, *types)
    assert own_panels(graph) == [0]
    checked(graph, 6)


def test_weights_that_iterations_share_lie_in_panels() -> None:
    """Few rows would not pay for a copy in each."""

    def rolled(x, w):
        return [td.scan(lambda c, r: (td.tanh(c @ w + r), c), x[0], x)[0]]

    types = TensorType((5, 32, 256), dtypes.float32), TensorType((256, 256), dtypes.float32)
    graph = td.trace(rolled, *types)
    products = [m for k in schedule(graph, panel=16).distinct() for m in matmuls_in(k.body)]
    assert {m.right.rows.stride for m in products} == {16}
    checked(graph, 6)


def times(rows: int, depth: int, columns: int) -> Graph:
    types = (TensorType(shape, dtypes.float32) for shape in ((rows, depth), (depth, columns)))
    return td.trace(lambda x, w: [x @ w], *types)


def test_few_rows_share_columns_that_lie_together() -> None:
    """Each thread reads some of the weights, not all of them for some rows."""
    graph = times(32, 512, 256)
    (kernel,) = schedule(graph, panel=16).distinct()
    assert cost.iterations(kernel) == 16
    (product,) = matmuls_in(kernel.body)
    assert product.left.rows.count == 32
    checked(graph, 4)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "panel", "is_copied"),
    [
        (32, 1024, 256, 32, False),
        (32, 768, 3072, 32, True),  # large
        (32, 512, 512, 16, False),
        (32, 1024, 256, 16, True),  # deep
        (32, 128, 1024, 16, True),  # every row in a page of its own
        (2, 768, 3072, 16, False),
        (32, 128, 1024, 32, False),
    ],
)
def test_few_rows_copy_what_is_far(
    rows: int, depth: int, columns: int, panel: int, is_copied: bool
) -> None:
    program = schedule(times(rows, depth, columns), panel=panel)
    products = [m for k in program.distinct() for m in matmuls_in(k.body)]
    assert {m.right.buffer != "p1" for m in products} == {is_copied}


@pytest.mark.parametrize("depth", [40, 300, 1500])
def test_scattered_left_operands_are_copied_by_parts(depth: int) -> None:
    """A block's copy stays in a cache, and what is far apart is fetched before it is copied."""
    x, y = (TensorType((depth, n), dtypes.float32) for n in (576, 512))
    graph = td.trace(lambda x, y: [x.T @ y], x, y)
    program = schedule(graph, panel=16)
    (copied,) = [k for k in program.distinct() if k.scratch]
    assert 0 < copied.scratch[0].size <= CPU.matmuls.copied_elements
    assert "llvm.prefetch" in render_program(program, Machine(8))
    checked(graph, 5)


def test_an_update_waits_for_the_panels_of_its_weight() -> None:
    """A weight that is read where it lies, and updated in the same step."""

    def updated(x, w):
        y = td.tanh(x @ w.T)
        return [y.sum(), w - 0.1 * (y.T @ x)]

    types = TensorType((64, 512), dtypes.float32), TensorType((256, 512), dtypes.float32)
    checked(td.trace(updated, *types), 8)


def test_short_functions_are_written_where_they_are_used() -> None:
    type_ = TensorType((64, 64), dtypes.float32)
    text = text_of(td.trace(lambda x: [td.erf(td.exp(x)), td.sin(x)], type_), 8)
    assert "call <8 x float> @treadle.sin" in text
    assert "<8 x float> @treadle.exp" not in text
    assert "<8 x float> @treadle.erf" not in text


# Contractions


@dataclass(frozen=True)
class Spec:
    """A contraction: labels of both operands and of the result, and their sizes."""

    left: str
    right: str
    result: str
    sizes: dict[str, int]

    @property
    def text(self) -> str:
        return f"{self.left},{self.right}->{self.result}"

    def shape(self, labels: str) -> tuple[int, ...]:
        return tuple(self.sizes[c] for c in labels)


@st.composite
def specs(draw_) -> Spec:
    """Batch, row, column and summed labels, in any order everywhere."""
    names = iter("abcdefgh")
    kinds = {
        kind: "".join(next(names) for _ in range(draw_(st.integers(0, 2))))
        for kind in ("batch", "rows", "columns", "depth")
    }
    sizes: dict[str, int] = {}
    left = MOST
    for label in draw_(st.permutations("".join(kinds.values()))):
        fitting = [n for n in NUMBERS if n <= left]
        sizes[label] = draw_(st.sampled_from(fitting))
        left //= sizes[label]

    def mixed(*parts: str) -> str:
        return "".join(draw_(st.permutations("".join(kinds[p] for p in parts))))

    return Spec(
        mixed("batch", "rows", "depth"),
        mixed("batch", "depth", "columns"),
        mixed("batch", "rows", "columns"),
        sizes,
    )


@given(specs(), st.sampled_from(dtypes.FLOATS), st.integers(2, 8))
@settings(max_examples=40, deadline=None)
def test_any_contraction(spec: Spec, dtype: DType, threads: int) -> None:
    operands = [TensorType(spec.shape(labels), dtype) for labels in (spec.left, spec.right)]
    graph = td.trace(lambda x, y: td.einsum(spec.text, x, y), *operands)
    checked(graph, len(spec.text), 1.0, threads)


VIEWS = {
    "as it is": lambda x: x,
    "computed": lambda x: td.tanh(x) * 0.5,
    "narrow": lambda x: td.cast(td.cast(x, td.bfloat16), td.float32),
    "turned over": lambda x: td.flip(x, -1),
    "every other": lambda x: td.concat([x, x + 1], -1)[..., ::2],
    "padded": lambda x: td.pad(x[..., 1:], [(0, 0)] * (x.ndim - 1) + [(1, 0)]),
    "chosen": lambda x: td.take(x, [0] * x.shape[0], 0),
    "broadcast": lambda x: td.expand(x[:1], *x.shape),
    "reshaped": lambda x: x.reshape(-1).reshape(*x.shape) * 1.0,
    "moved": lambda x: td.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)])[..., :-1],
}


@given(
    st.sampled_from(["ab,bc->ac", "ba,bc->ac", "ab,cb->ac", "dab,dbc->dac", "abd,cbd->cad"]),
    st.lists(st.sampled_from(NUMBERS[:16]), min_size=4, max_size=4),
    st.sampled_from(sorted(VIEWS)),
    st.sampled_from(sorted(VIEWS)),
)
@settings(max_examples=20, deadline=None)
def test_products_of_views_with_gradients(
    text: str, numbers: list[int], first: str, second: str
) -> None:
    sizes = dict(zip("abcd", numbers, strict=True))
    sizes["d"] = min(sizes["d"], 5)
    left, right = text.split("->")[0].split(",")
    types = [TensorType(tuple(sizes[c] for c in labels)) for labels in (left, right)]

    def loss(x, y):
        return (td.einsum(text, VIEWS[first](x), VIEWS[second](y)) ** 2).mean()

    checked(differentiate(td.trace(loss, *types), ["x", "y"]).graph, sum(numbers))


# Shapes that take each way through the templates: packed or direct on the right, copied on the
# left, rows or panels shared, the depth in parts.
WAYS = {
    "few rows": ("ab,bc->ac", (5, 40, 37)),
    "packed": ("ab,bc->ac", (160, 33, 67)),
    "panels shared": ("ab,bc->ac", (12, 64, 256)),
    "depth in parts": ("ab,bc->ac", (3, 8448, 5)),
    "long depth": ("ab,bc->ac", (131, 1100, 34)),
    "left copied": ("ba,bc->ac", (70, 300, 130)),
    "both turned": ("ba,cb->ac", (40, 70, 50)),
    "a prime of everything": ("ab,bc->ac", (131, 137, 139)),
    "batched": ("dab,dbc->dac", (20, 17, 40, 6)),
    "batch inside": ("adb,bdc->adc", (20, 17, 40, 6)),
    "columns apart": ("abd,cd->abc", (7, 9, 11, 33)),
    "a row": ("b,bc->c", (0, 65, 70)),
    "a column": ("ab,b->a", (65, 70)),
    "a number": ("b,b->", (0, 1000)),
    "an outer product": ("a,c->ac", (17, 0, 65)),
}


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float64, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_every_way_through_the_template(name: str, dtype: DType) -> None:
    text, numbers = WAYS[name]
    sizes = dict(zip("abcd", numbers, strict=False))
    left, right = text.split("->")[0].split(",")
    types = [TensorType(tuple(sizes[c] for c in labels), dtype) for labels in (left, right)]
    checked(td.trace(lambda x, y: td.einsum(text, x, y), *types), 1, 1.0)


def multiplies(body: tuple[Statement, ...]) -> int:
    inner = sum(multiplies(s.body) for s in body if isinstance(s, For))
    return inner + sum(isinstance(s, Matmul) for s in body)


@pytest.mark.parametrize("name", [n for n in WAYS if n not in ("a column", "a number")])
def test_products_go_through_the_template(name: str) -> None:
    text, numbers = WAYS[name]
    sizes = dict(zip("abcd", numbers, strict=False))
    types = [TensorType(tuple(sizes[c] for c in s)) for s in text.split("->")[0].split(",")]
    program = schedule(td.trace(lambda x, y: td.einsum(text, x, y), *types))
    has_depth = "b" in text.split("->")[0] and "b" not in text.split("->")[1]
    found = sum(multiplies(c.kernel.body) for c in program.calls())
    assert (found > 0) == (has_depth or text.startswith("abd")), name


BATCHES_LAST = {
    "large matmuls": ("abd,bcd->acd", (40, 33, 37, 5), True),
    "turned, two batch axes": ("bade,cbde->cade", (33, 40, 34, 3, 2), True),
    "small matmuls": ("abd,bcd->acd", (7, 9, 11, 40), False),
    "no columns": ("abd,bd->ad", (70, 65, 16), False),
}


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("name", BATCHES_LAST)
def test_batches_in_the_last_axis(name: str, dtype: DType) -> None:
    """Large matmuls have their batch moved to the front; loops run along it for small ones."""
    text, numbers, is_multiplied = BATCHES_LAST[name]
    letters = "abde" if name == "no columns" else "abcde"
    sizes = dict(zip(letters, numbers, strict=False))
    labels = (*text.split("->")[0].split(","), text.split("->")[1])
    types = [TensorType(tuple(sizes[c] for c in part), dtype) for part in labels[:2]]
    graph = td.trace(lambda x, y: contract(x, y, labels, dtype), *types)
    found = sum(multiplies(c.kernel.body) for c in schedule(graph).calls())
    assert (found > 0) == is_multiplied
    checked(graph, 1, 1.0)


@pytest.mark.parametrize("spec", ["ab,bc->ac", "a,a->"])
def test_a_wider_result_is_summed_wide(spec: str) -> None:
    """float32 operands with a float64 result: products and sums are float64's."""
    sizes = {"a": 5000 if spec == "a,a->" else 3, "b": 5000, "c": 4}
    labels = (*spec.split("->")[0].split(","), spec.split("->")[1])
    types = [TensorType(tuple(sizes[c] for c in part)) for part in labels[:2]]
    graph = td.trace(lambda x, y: contract(x, y, labels, td.float64), *types)
    arrays = draw(graph, 0)
    wide = [a.astype(np.float64) for a in arrays.values()]
    found = build(graph).on(1).run(arrays)[0]
    np.testing.assert_allclose(found, np.einsum(spec, *wide), rtol=1e-10, atol=1e-10)


def test_bits_of_a_product_do_not_depend_on_its_rows() -> None:
    """An element is summed in one order, whichever tile it falls into."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=(90, 70)).astype(np.float32)
    x = rng.normal(size=(67, 90)).astype(np.float32)
    whole = build(td.trace(lambda x, y: x @ y, td.Spec((67, 90)), td.Spec((90, 70))))
    (expected,) = whole.on(2).run({"x": x, "y": y})
    for rows in (1, 2, 3, 5, 8, 31):
        part = build(td.trace(lambda x, y: x @ y, td.Spec((rows, 90)), td.Spec((90, 70))))
        (found,) = part.on(1).run({"x": x[:rows], "y": y})
        assert found.tobytes() == expected[:rows].tobytes(), rows


# Convolutions


@dataclass(frozen=True)
class Convolution:
    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@st.composite
def convolutions(draw_) -> Convolution:
    dims = draw_(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw_(st.integers(low, high)) for _ in range(dims))

    groups = draw_(st.sampled_from([1, 1, 1, 2, 3]))
    inputs, outputs = (groups * draw_(st.sampled_from(n)) for n in ([1, 2, 5], [1, 3, 4]))
    kernel, stride, padding, dilation = each(1, 3), each(1, 3), each(0, 2), each(1, 2)
    parts = zip(kernel, padding, dilation, each(0, 6 if dims < 3 else 3), strict=True)
    spatial = tuple(max(1, (k - 1) * d + 1 - 2 * p) + extra for k, p, d, extra in parts)
    batch = draw_(st.integers(1, 3))
    return Convolution(
        (batch, inputs, *spatial),
        (outputs, inputs // groups, *kernel),
        stride,
        padding,
        dilation,
        groups,
    )


def convolved(c: Convolution, dtype: DType) -> Graph:
    """A convolution with a bias, and the gradients of its square."""

    def loss(x, w, b):
        y = td.conv(x, w, b, c.stride, c.padding, c.dilation, c.groups)
        td.capture("y", y)
        return (y * y).mean()

    types = [TensorType(s, dtype) for s in (c.x, c.weight, c.weight[:1])]
    return differentiate(td.trace(loss, *types), ["x", "w", "b"]).graph


@given(convolutions(), st.sampled_from([dtypes.float32, dtypes.float32, *dtypes.FLOATS]))
@settings(max_examples=12, deadline=None)
def test_any_convolution_with_gradients(c: Convolution, dtype: DType) -> None:
    checked(convolved(c, dtype), math.prod(c.x))


LAYERS = {
    "3×3 of many channels": Convolution((3, 16, 14, 14), (32, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "from one channel": Convolution((4, 1, 20, 20), (16, 1, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "patches": Convolution((2, 3, 16, 16), (24, 3, 4, 4), (4, 4), (0, 0), (1, 1), 1),
    "depthwise": Convolution((2, 24, 9, 9), (24, 1, 3, 3), (1, 1), (1, 1), (1, 1), 24),
    "1×1": Convolution((2, 24, 7, 7), (40, 24, 1, 1), (1, 1), (0, 0), (1, 1), 1),
    "a long signal": Convolution((2, 4, 301), (8, 4, 7), (3,), (3,), (2,), 1),
    "wide rows, every second": Convolution(
        (2, 3, 8, 264), (33, 3, 3, 3), (2, 2), (1, 1), (1, 1), 1
    ),
    "short rows of a volume": Convolution(
        (2, 3, 4, 15, 15), (33, 3, 3, 1, 1), (1, 1, 1), (1, 0, 0), (1, 1, 1), 1
    ),
    "a prime number of outputs": Convolution((2, 3, 445), (33, 3, 15), (3,), (7,), (1,), 1),
    "rows that leave a rest": Convolution((3, 5, 19, 17), (33, 5, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "few outputs": Convolution((2, 8, 14, 14), (3, 8, 5, 5), (1, 1), (2, 2), (1, 1), 1),
    "video": Convolution((1, 3, 5, 8, 8), (8, 3, 2, 3, 3), (1, 2, 2), (0, 1, 1), (1, 1, 1), 1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_convolutions_of_layers(name: str) -> None:
    checked(convolved(LAYERS[name], dtypes.float32), 7)


# More columns than a group of copied windows has, so that axes before the group's are left over.
WIDE = {
    "a wide image": Convolution((2, 2, 8, 300), (24, 2, 3, 3), (2, 2), (1, 1), (1, 1), 1),
    "a prime width": Convolution((2, 2, 3, 263), (24, 2, 1, 3), (1, 2), (0, 1), (1, 1), 1),
    "a volume": Convolution(
        (2, 2, 5, 16, 16), (24, 2, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1
    ),
    "a wide volume": Convolution(
        (2, 1, 3, 5, 270), (24, 1, 1, 1, 3), (1, 1, 2), (0, 0, 1), (1, 1, 1), 1
    ),
}


@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize("name", WIDE)
def test_windows_of_more_columns_than_a_group(name: str, width: int) -> None:
    c = WIDE[name]
    types = [TensorType(s) for s in (c.x, c.weight)]
    graph = td.trace(lambda x, w: td.conv(x, w, None, c.stride, c.padding, c.dilation), *types)
    arrays = draw(graph, 7)
    assert_within(graph, arrays, build(graph, width=width, shared=True).on(2).run(arrays))


@st.composite
def large_convolutions(draw_) -> Convolution:
    """Sizes of layers as people have them: too large to be computed here, not to be scheduled."""
    dims = draw_(st.integers(1, 3))
    channels, most = st.sampled_from([1, 3, 16, 24, 32, 33, 64, 100]), (4000, 520, 70)[dims - 1]
    kernel = tuple(draw_(st.sampled_from([1, 2, 3, 4, 5, 7])) for _ in range(dims))
    spatial = tuple(draw_(st.integers(8, most)) for _ in range(dims))
    stride, padding = (
        tuple(draw_(st.integers(low, high)) for _ in range(dims)) for low, high in ((1, 3), (0, 3))
    )
    x = (draw_(st.sampled_from([1, 2, 8, 30])), draw_(channels), *spatial)
    return Convolution(x, (draw_(channels), x[1], *kernel), stride, padding, (1,) * dims, 1)


@given(large_convolutions(), st.sampled_from([8, 16, 32]))
@settings(max_examples=15, deadline=None)
def test_large_convolutions_fill_their_results(c: Convolution, panel: int) -> None:
    """The schedule counts what is stored; other tests compare it."""
    schedule(convolved(c, dtypes.float32), panel=panel)


@pytest.mark.parametrize(("outputs", "is_tiled"), [(3, False), (7, False), (24, True)])
def test_windows_are_not_gathered_for_a_few_rows(outputs: int, is_tiled: bool) -> None:
    """A weight's gradient sums along rows of the image; more outputs are columns themselves."""

    def gradient(x, w, ct):
        return td.vjp(lambda w: td.conv(x, w), w)[1](ct)

    shapes = (2, 16, 24, 24), (outputs, 16, 5, 5), (2, outputs, 20, 20)
    kernels = [c.kernel for c in schedule(td.trace(gradient, *map(td.Spec, shapes))).calls()]
    assert any(m for k in kernels for m in matmuls_in(k.body)) is is_tiled


@pytest.mark.parametrize("sizes", [(149,), (1499,), (19, 17), (131, 131), (7, 13, 11), (64, 64)])
def test_groups_of_columns_fill_lanes_whatever_divides_them(sizes: tuple[int, ...]) -> None:
    group = full_group([Var(f"i{k}", n) for k, n in enumerate(sizes)], 16, 128)
    groups = [group] * group.loop.extent + ([group.rest] if group.rest else [])
    assert sum(g.part for g in groups) == group.axis.extent
    assert 16 <= group.columns <= 128
    columns = sum(g.columns for g in groups)
    assert columns >= 0.75 * sum(-(-g.columns // 16) * 16 for g in groups)


@pytest.mark.parametrize("kernel", [(2,), (3, 2), (2, 2, 2)])
@pytest.mark.parametrize("pool", ["max_pool", "avg_pool"])
def test_pools_with_gradients(pool: str, kernel: tuple[int, ...]) -> None:
    def loss(x):
        total = 0.0
        for stride, padding in ((None, 0), (1, 1), (2, 1), (3, 0)):
            total = total + (getattr(td, pool)(x, kernel, stride, padding) ** 2).mean()
        return total

    shape = (2, 3, *(7 + i for i in range(len(kernel))))
    checked(differentiate(td.trace(loss, td.Spec(shape)), ["x"]).graph, len(kernel))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes",  # batch, heads, key heads, length, depth, width
    [
        (1, 1, 1, 1, 1, 1),
        (2, 3, 3, 1, 8, 8),
        (1, 2, 1, 2, 1, 1),
        (2, 4, 2, 3, 5, 1),
        (1, 1, 1, 64, 1, 9),
    ],
)
def test_attention_of_any_size_with_gradients(sizes: tuple[int, ...], causal: bool) -> None:
    """A loop of one turn vanishes, with all that is in it."""
    b, heads, groups, length, depth, width = sizes
    types = [
        TensorType((b, heads, length, depth)),
        TensorType((b, groups, length, depth)),
        TensorType((b, groups, length, width)),
    ]

    def loss(q, k, v):
        return (td.attention(q, k, v, causal=causal) ** 2).sum()

    checked(differentiate(td.trace(loss, *types), ["q", "k", "v"]).graph, length + depth)
