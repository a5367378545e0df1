"""Exporters of the composites that ONNX has operators for, and of `call` and `scan`."""

from __future__ import annotations

import math

import numpy as np

from treadle.interop.onnx.library import library
from treadle.interop.onnx.writer.linear import convolution, gather
from treadle.interop.onnx.writer.nodes import Nodes, value_info
from treadle.interop.onnx.writer.shaping import logsumexp, mean
from treadle.interop.onnx.writer.sizes import fixed
from treadle.interop.onnx.writer.walk import EXPORT, Exporter, Site, Walk
from treadle.ir import composites as c
from treadle.ir.control import CALL, SCAN, Call, Scan, body_input_types
from treadle.ir.graph import Value

GELU_FROM, GROUP_NORM_FROM, RMS_NORM_FROM, ATTENTION_FROM = 20, 21, 23, 23
DILATED_AVERAGE_FROM = 19
STEEP = 15.0  # where softplus is x to float32's last bit


def _named(name: str) -> Exporter:
    def export(site: Site) -> list[str]:
        return [site.nodes.add(name, site.names[0])]

    return export


EXPORT(c.RELU)(_named("Relu"))
EXPORT(c.SIGMOID)(_named("Sigmoid"))
EXPORT(c.MEAN)(mean)
EXPORT(c.LOGSUMEXP)(logsumexp)
EXPORT(c.CONV)(convolution)
EXPORT(c.EMBEDDING)(gather)


@EXPORT(c.SILU)
def _silu(site: Site) -> list[str]:
    """Not `Swish`, which opset 24 has and runtimes do not yet."""
    x = site.names[0]
    return [site.nodes.add("Mul", x, site.nodes.add("Sigmoid", x))]


@EXPORT(c.GELU)
def _gelu(site: Site) -> list[str]:
    assert isinstance(site.attributes, c.Gelu)
    if site.nodes.opset < GELU_FROM:
        return site.expanded()
    return [site.nodes.add("Gelu", site.names[0], approximate=site.attributes.approximate)]


@EXPORT(c.SOFTPLUS)
def _softplus(site: Site) -> list[str]:
    a = site.attributes
    assert isinstance(a, c.Softplus)
    if a.beta != 1 or a.threshold < STEEP:
        return site.expanded()
    return [site.nodes.add("Softplus", site.names[0])]


@EXPORT(c.SOFTMAX, c.LOG_SOFTMAX)
def _softmax(site: Site) -> list[str]:
    assert isinstance(site.attributes, c.Axis)
    name = "Softmax" if site.node.op is c.SOFTMAX else "LogSoftmax"
    return [site.nodes.add(name, site.names[0], axis=site.attributes.axis)]


@EXPORT(c.LAYER_NORM, c.RMS_NORM)
def _norm(site: Site) -> list[str]:
    a = site.attributes
    assert isinstance(a, c.Norm)
    name, (x, *affine) = "LayerNormalization", site.names
    if site.node.op is c.RMS_NORM:
        if site.nodes.opset < RMS_NORM_FROM:
            return site.expanded()
        name = "RMSNormalization"
    if not affine:
        shape = fixed("layer_norm", site.sizes(0)[-a.dims :])
        affine = [site.nodes.constant(np.ones(shape), site.types[0].dtype)]
    return [site.nodes.add(name, x, *affine, axis=-a.dims, epsilon=a.eps)]


@EXPORT(c.GROUP_NORM)
def _group_norm(site: Site) -> list[str]:
    a = site.attributes
    assert isinstance(a, c.GroupNorm)
    if site.nodes.opset < GROUP_NORM_FROM or len(site.names) < 3 or site.types[0].rank < 3:
        return site.expanded()
    name = "GroupNormalization"
    return [site.nodes.add(name, *site.names, num_groups=a.groups, epsilon=a.eps)]


@EXPORT(c.ATTENTION)
def _attention(site: Site) -> list[str]:
    """`Attention`, or by `Softmax`; its definition where the sums of the scores are read too.

    With a bias a row may see nothing, which is zeros by the definition and NaN by `Softmax`.
    """
    a = site.attributes
    assert isinstance(a, c.Attention)
    if site.is_used(1):
        return site.expanded()
    if site.nodes.opset >= ATTENTION_FROM:
        options = {"scale": a.scale, "is_causal": int(a.causal)}
        return [site.nodes.add("Attention", *site.names, **options), ""]
    q, k = site.types[:2]
    if len(site.names) > 3 or q.dtype.is_narrow:
        return site.expanded()
    return [_by_softmax(site, a, q.shape[1] // k.shape[1], q.shape[2], k.shape[2]), ""]


def _by_softmax(site: Site, a: c.Attention, repeats: int, t: int, s: int) -> str:
    nodes, dtype = site.nodes, site.types[0].dtype
    scaled = nodes.add("Mul", site.names[0], nodes.constant(a.scale, dtype))
    keys, values = (_repeated(site, operand, repeats) for operand in (1, 2))
    scores = nodes.add("MatMul", scaled, nodes.permute(keys, (0, 1, 3, 2)))
    if a.causal:
        site.fixed(0, 2)
        hidden = np.where(np.arange(s) > np.arange(t)[:, None], -np.inf, 0.0)
        scores = nodes.add("Add", scores, nodes.constant(hidden, dtype))
    return nodes.add("MatMul", nodes.add("Softmax", scores, axis=-1), values)


def _repeated(site: Site, operand: int, repeats: int) -> str:
    """Keys or values (B, G, S, D), each of the G as often as there are heads of queries for it."""
    name = site.names[operand]
    if repeats == 1:
        return name
    b, groups, *rest = site.sizes(operand)
    assert isinstance(groups, int)
    apart = site.nodes.reshape(name, (b, groups, 1, *rest))
    spread = site.nodes.expand(apart, (b, groups, repeats, *rest))
    return site.nodes.reshape(spread, (b, groups * repeats, *rest))


@EXPORT(c.CONV_GRAD_X)
def _conv_transpose(site: Site) -> list[str]:
    a = site.attributes
    assert isinstance(a, c.ConvGrad)
    conv, kernel = a.conv, site.types[1].shape[2:]
    extra = []
    for i, size in enumerate(a.shape[2:]):
        reach = conv.dilations[i] * (kernel[i] - 1) + 1
        whole = (site.fixed(0, i + 2) - 1) * conv.strides[i] + reach - sum(conv.padding[i])
        extra.append(size - whole)
    most = zip(extra, conv.strides, conv.dilations, strict=True)
    if any(not 0 <= e < max(s, d) for e, s, d in most) or site.types[0].size == 0:
        return site.expanded()
    lows, highs = zip(*conv.padding, strict=True)
    name = site.nodes.add(
        "ConvTranspose",
        *site.names,
        strides=conv.strides,
        pads=[*lows, *highs],
        dilations=conv.dilations,
        group=conv.groups,
        output_padding=extra,
        kernel_shape=kernel,
    )
    return [name]


@EXPORT(c.MAX_POOL, c.AVG_POOL)
def _pool(site: Site) -> list[str]:
    a = site.attributes
    assert isinstance(a, c.Pool)
    is_max = site.node.op is c.MAX_POOL
    is_dilated = any(d != 1 for d in a.dilations)
    if not is_max and is_dilated and site.nodes.opset < DILATED_AVERAGE_FROM:
        return site.expanded()
    x, sizes, result = site.names[0], site.sizes(0), site.result_sizes()
    dims = len(a.sizes)
    lead = len(sizes) - dims
    if not site.types[0].is_float or not 1 <= dims <= 3 or (lead != 2 and 0 in sizes):
        return site.expanded()
    if lead != 2:  # all axes before the windows' as channels
        count = math.prod(fixed(str(site.node.op), sizes[:lead]))
        x = site.nodes.reshape(x, (1, count, *sizes[lead:]))
    options: dict[str, object] = {
        "kernel_shape": a.sizes,
        "strides": a.strides,
        "pads": [*a.padding, *a.padding],
    }
    if not is_max:
        options["count_include_pad"] = int(a.count_padding)
    if is_max or is_dilated:
        options["dilations"] = a.dilations
    name = site.nodes.add("MaxPool" if is_max else "AveragePool", x, **options)
    return [name if lead == 2 else site.nodes.reshape(name, result)]


# Bodies


@EXPORT(CALL)
def _call(site: Site) -> list[str]:
    ours, theirs = site.node.attributes, site.other.attributes
    assert isinstance(ours, Call)
    assert isinstance(theirs, Call)
    return site.inlined(ours.body, theirs.body, site.names)


@EXPORT(SCAN)
def _scan(site: Site) -> list[str]:
    """`Scan`; what the body reads of outside it names, as bodies of ONNX may."""
    a = site.attributes
    assert isinstance(a, Scan)
    constants, carries, rows = _operands(site, a)
    stacked = len(a.body.outputs) - a.carries
    if a.length == 0 and site.walk.pair.batch is None:
        types = site.node.types[a.carries :]
        empty = [site.nodes.constant(np.zeros(t.shape), t.dtype) for t in types]
        return [*(site.nodes.add("Identity", n) for n in carries), *empty]
    if not rows:  # there is something to count the iterations by
        count = [site.nodes.number(n) for n in (0, a.length, 1)]
        rows = [site.nodes.add("Range", *count)]
    body, scanned = _body(site, a, constants, len(rows))
    ways = [int(a.reverse)]
    return site.nodes.several(
        "Scan",
        [*carries, *rows],
        a.carries + stacked,
        body=body,
        num_scan_inputs=scanned,
        scan_input_directions=ways * scanned,
        **({"scan_output_directions": ways * stacked} if stacked else {}),
    )


def _operands(site: Site, a: Scan) -> tuple[list[str], list[str], list[str]]:
    names = site.names
    first = a.constants + a.carries
    return names[: a.constants], names[a.constants : first], names[first:]


def _body(site: Site, a: Scan, constants: list[str], scanned: int) -> tuple[object, int]:
    """The body as a graph of its own, and how many inputs it goes along."""
    theirs = site.other.attributes
    assert isinstance(theirs, Scan)
    pair = site.walk.pair.of(a.body, theirs.body)
    nodes: Nodes = site.nodes.inside()
    types = body_input_types(a.body)[a.constants :]
    given = [nodes.names.new("item") for _ in types]
    walk = Walk(nodes, pair, dict(zip(a.body.inputs, [*constants, *given], strict=True)))
    # An output of a body is of its own: one that is an input or of outside is copied.
    results = [nodes.add("Identity", name) for name in walk.run()]
    sizes = [pair.sizes(Value(i)) for i in a.body.inputs[a.constants :]]
    inputs = [value_info(n, t, s) for n, t, s in zip(given, types, sizes, strict=True)]
    if len(inputs) < a.carries + scanned:
        counter = library().helper.make_tensor_value_info(nodes.names.new("count"), 7, [])
        inputs.append(counter)
    made = [(o, pair.graph.type_of(o.value), pair.sizes(o.value)) for o in a.body.outputs]
    outputs = [value_info(n, t, s) for n, (_, t, s) in zip(results, made, strict=True)]
    return library().helper.make_graph(nodes.finished(results), "body", inputs, outputs), scanned
