"""Sums that are one of ONNX's operators with what they add: `Gemm`, `Conv`, `BatchNormalization`.

What they take the place of is written too, and left out in the end as nothing reads it.
"""

from __future__ import annotations

from treadle.interop.onnx.writer.linear import convolution, operands_of
from treadle.interop.onnx.writer.walk import EXPORT, Site
from treadle.ir import composites as c
from treadle.ir.graph import Value
from treadle.ir.ops import elementwise as e
from treadle.ir.ops import linear, shaping
from treadle.rules.pattern import Anything, Number, apply, captures, in_each_order, number_of

_VARIANCE = apply(shaping.RESHAPE, Anything("variance"))
_SCALE = apply(e.RSQRT, apply(e.ADD, _VARIANCE, Number(name="eps")))
_CENTRED = apply(e.SUB, Anything("x"), apply(shaping.BROADCAST, Anything("mean"), name="at mean"))
_NORMAL = apply(
    e.MUL, _CENTRED, apply(shaping.BROADCAST, apply(shaping.RESHAPE, _SCALE), name="at scale")
)
_WEIGHED = apply(
    e.MUL, _NORMAL, apply(shaping.BROADCAST, Anything("weight"), name="at weight"), single_use=True
)
# (x − mean) · (variance + eps)^−½ · weight + bias
NORM = apply(e.ADD, _WEIGHED, apply(shaping.BROADCAST, Anything("bias"), name="at bias"))
# A product or convolution that nothing else reads, and a vector.
PRODUCT = apply(
    e.ADD,
    apply(frozenset([linear.CONTRACT, c.CONV]), name="product", single_use=True),
    apply(shaping.BROADCAST, Anything("bias"), name="at bias"),
    commutes=True,
)


@EXPORT(e.ADD)
def _add(site: Site) -> list[str]:
    return _norm(site) or _biased(site) or [site.nodes.add("Add", *site.broadcasting())]


def _vectors(site: Site, found: dict[str, Value]) -> dict[str, str] | None:
    """What is spread along a tensor (N, C, …), if it is one number for each channel."""
    nodes, named = site.walk.pair.graph.nodes, {}
    for name, value in found.items():
        if not name.startswith("at "):
            continue
        spread = nodes[value.node]
        assert isinstance(spread.attributes, shaping.Broadcast)
        source = spread.operands[0]
        shape = site.walk.pair.graph.type_of(source).shape
        # Axes of one element are kept where the result has one element too.
        if spread.attributes.axes[:1] != (1,) or any(n != 1 for n in shape[1:]):
            return None
        named[name.removeprefix("at ")] = _vector(site, source, shape[0])
    return named


def _vector(site: Site, source: Value, size: int) -> str:
    graph = site.walk.pair.graph
    if graph.type_of(source).rank == 1:
        return site.walk.name(source)
    node = graph.nodes[source.node]
    if node.op is shaping.RESHAPE and graph.type_of(node.operands[0]).rank == 1:
        return site.walk.name(node.operands[0])
    return site.nodes.reshape(site.walk.name(source), (size,))


def _norm(site: Site) -> list[str]:
    """Of given statistics, as a norm over the batch has in evaluation."""
    graph = site.walk.pair.graph
    found = captures(graph, NORM, site.node, site.walk.uses)
    if found is None or graph.type_of(found["variance"]).rank != 1:
        return []
    vectors = _vectors(site, found)
    eps = number_of(graph, found["eps"])
    if vectors is None or eps is None:
        return []
    x, variance = site.walk.name(found["x"]), site.walk.name(found["variance"])
    names = [x, vectors["weight"], vectors["bias"], vectors["mean"], variance]
    return [site.nodes.add("BatchNormalization", *names, epsilon=float(eps))]


def _biased(site: Site) -> list[str]:
    """`Conv` or `Gemm` with a bias."""
    for pattern in in_each_order(PRODUCT):
        found = captures(site.walk.pair.graph, pattern, site.node, site.walk.uses)
        if found is None:
            continue
        inner, vectors = Site(site.walk, found["product"].node), _vectors(site, found)
        if vectors is None:
            continue
        if isinstance(inner.attributes, c.Conv):
            return convolution(inner, vectors["bias"])
        if _is_gemm(inner):
            x, y = operands_of(inner)
            bias, is_turned = vectors["bias"], _is_transposed(inner)
            return [site.nodes.add("Gemm", x, y, bias, transB=int(is_turned))]
    return []


def _is_transposed(site: Site) -> bool:
    assert isinstance(site.attributes, linear.Contraction)
    return site.attributes.spec == "ab,cb->ac"


def _is_gemm(site: Site) -> bool:
    """Whether a contraction is a product of matrices of floats, the second perhaps transposed."""
    attributes = site.attributes
    assert isinstance(attributes, linear.Contraction)
    is_float = attributes.dtype.is_float and not attributes.dtype.is_narrow
    return is_float and (attributes.spec == "ab,bc->ac" or _is_transposed(site))
