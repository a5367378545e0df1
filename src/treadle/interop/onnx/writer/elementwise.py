"""Exporters of elementwise ops."""

from __future__ import annotations

import math

from treadle.base import dtypes
from treadle.interop.onnx.writer.walk import EXPORT, Exporter, Site
from treadle.ir.op import Op
from treadle.ir.ops import elementwise as e

PLAIN: dict[Op, str] = {
    e.NEG: "Neg",
    e.ABS: "Abs",
    e.SIGN: "Sign",
    e.FLOOR: "Floor",
    e.EXP: "Exp",
    e.LOG: "Log",
    e.SQRT: "Sqrt",
    e.SIN: "Sin",
    e.COS: "Cos",
    e.TANH: "Tanh",
    e.ERF: "Erf",
    e.STOP_GRADIENT: "Identity",
    e.SUB: "Sub",
    e.MUL: "Mul",
    e.DIV: "Div",
    e.MAX: "Max",
    e.MIN: "Min",
    e.POW: "Pow",
    e.EQ: "Equal",
    e.LT: "Less",
    e.LE: "LessOrEqual",
    e.WHERE: "Where",
}


def _plain(name: str) -> Exporter:
    def export(site: Site) -> list[str]:
        return [site.nodes.add(name, *site.broadcasting())]

    return export


for _op, _name in PLAIN.items():
    EXPORT(_op)(_plain(_name))


def _logic(name: str, bitwise: str) -> Exporter:
    def export(site: Site) -> list[str]:
        is_bool = site.types[0].dtype is dtypes.bool_
        return [site.nodes.add(name if is_bool else bitwise, *site.broadcasting())]

    return export


EXPORT(e.NOT)(_logic("Not", "BitwiseNot"))
EXPORT(e.AND)(_logic("And", "BitwiseAnd"))
EXPORT(e.OR)(_logic("Or", "BitwiseOr"))
EXPORT(e.XOR)(_logic("Xor", "BitwiseXor"))


@EXPORT(e.RSQRT)
def _rsqrt(site: Site) -> list[str]:
    return [site.nodes.add("Reciprocal", site.nodes.add("Sqrt", *site.names))]


@EXPORT(e.CAST)
def _cast(site: Site) -> list[str]:
    return [site.nodes.cast(site.names[0], site.node.types[0].dtype)]


def _scalar(site: Site, value: float) -> str:
    return site.nodes.constant(value, site.types[0].dtype)


@EXPORT(e.FLOORDIV)
def _floordiv(site: Site) -> list[str]:
    """ONNX's division of integers rounds to zero: what is left over goes first."""
    add = site.nodes.add
    x, y = site.broadcasting()
    if site.types[0].is_float:
        return [add("Floor", add("Div", x, y))]
    zero = _scalar(site, 0)
    is_zero = add("Equal", y, zero)
    safe = add("Where", is_zero, _scalar(site, 1), y)
    quotient = add("Div", add("Sub", x, add("Mod", x, safe)), safe)
    return [add("Where", is_zero, zero, quotient)]


@EXPORT(e.MOD)
def _mod(site: Site) -> list[str]:
    """The sign of y; 0 for integers where y is."""
    add = site.nodes.add
    x, y = site.broadcasting()
    zero = _scalar(site, 0)
    if not site.types[0].is_float:
        is_zero = add("Equal", y, zero)
        safe = add("Where", is_zero, _scalar(site, 1), y)
        return [add("Where", is_zero, zero, add("Mod", x, safe))]
    rest = add("Mod", x, y, fmod=1)
    differs = add("Less", add("Mul", add("Sign", rest), add("Sign", y)), zero)
    return [add("Where", differs, add("Add", rest, y), rest)]


@EXPORT(e.ATAN2)
def _atan2(site: Site) -> list[str]:
    """The angle in the first octant, then turned. Zeros count as positive, whatever their sign."""
    add = site.nodes.add
    y, x = site.broadcasting()
    zero, one = _scalar(site, 0), _scalar(site, 1)
    height, width = add("Abs", y), add("Abs", x)
    most, least = add("Max", height, width), add("Min", height, width)
    safe = add("Where", add("Equal", most, zero), one, most)
    is_same = add("And", add("Equal", most, least), add("Less", zero, most))
    angle = add("Atan", add("Where", is_same, one, add("Div", least, safe)))
    steep = add("Sub", _scalar(site, math.pi / 2), angle)
    angle = add("Where", add("Less", width, height), steep, angle)
    turned = add("Sub", _scalar(site, math.pi), angle)
    angle = add("Where", add("Less", x, zero), turned, angle)
    return [add("Where", add("Less", y, zero), add("Neg", angle), angle)]
