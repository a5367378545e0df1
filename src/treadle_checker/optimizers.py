"""The checker's own definitions of optimizers: the new value of one parameter, and of its state.

The formulas are PyTorch's; numbers such as the rate are state of the step. Optimizers that are not
here are taken as the named graph that a file has of them, and the claim says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from treadle_checker.formulas import Formula

New = tuple[Formula, dict[str, Formula]]


class One(NamedTuple):
    """What an update reads of one parameter; weight decay is done."""

    p: Formula
    g: Formula
    state: Mapping[str, Formula]
    hyper: Mapping[str, Formula]
    rate: Formula
    t: Formula  # the number of this update, from 1
    flags: Mapping[str, bool]

    def average(self, slot: str, value: Formula, beta: str) -> Formula:
        """β · old + (1 − β) · value"""
        return self.state[slot] * self.hyper[beta] + value * (1 - self.hyper[beta])

    def correction(self, beta: str) -> Formula:
        """1 − βᵗ, as 2h / (1 + h) with h = tanh(−½ t log β)."""
        half = (self.t * self.hyper[beta].apply("log") * -0.5).apply("tanh")
        return 2 * half / (1 + half)


def sgd(one: One) -> New:
    if not one.flags["momentum"]:
        return one.p - one.g * one.rate, {}
    momentum = one.hyper["momentum"]
    running = one.state["momentum"] * momentum + one.g * (1 - one.hyper["dampening"])
    buffer = one.t.equals(1).chosen(one.g, running)  # the first is the gradient itself
    step = one.g + buffer * momentum if one.flags["nesterov"] else buffer
    return one.p - step * one.rate, {"momentum": buffer}


def adam(one: One) -> New:
    m = one.average("m", one.g, "beta1")
    v = one.average("v", one.g * one.g, "beta2")
    new = {"m": m, "v": v}
    if one.flags["amsgrad"]:
        v = new["v_max"] = one.state["v_max"].most(v)
    root = v.apply("sqrt") * (1 / one.correction("beta2").apply("sqrt"))
    step = m / (root + one.hyper["eps"])
    return one.p - step * (one.rate / one.correction("beta1")), new


def adagrad(one: One) -> New:
    total = one.state["sum"] + one.g * one.g
    rate = one.rate / (1 + (one.t - 1) * one.hyper["lr_decay"])
    return one.p - one.g / (total.apply("sqrt") + one.hyper["eps"]) * rate, {"sum": total}


def rmsprop(one: One) -> New:
    v = one.average("v", one.g * one.g, "alpha")
    new = {"v": v}
    if one.flags["centered"]:
        mean = new["mean"] = one.average("mean", one.g, "alpha")
        v = (v - mean * mean).most(0.0)
    step = one.g / (v.apply("sqrt") + one.hyper["eps"])
    if one.flags["momentum"]:
        step = new["momentum"] = one.state["momentum"] * one.hyper["momentum"] + step
    return one.p - step * one.rate, new


def adadelta(one: One) -> New:
    eps = one.hyper["eps"]
    v = one.average("v", one.g * one.g, "rho")
    step = (one.state["steps"] + eps).apply("sqrt") / (v + eps).apply("sqrt") * one.g
    return one.p - step * one.rate, {"v": v, "steps": one.average("steps", step * step, "rho")}


def lion(one: One) -> New:
    step = one.average("m", one.g, "beta1").apply("sign")
    return one.p - step * one.rate, {"m": one.average("m", one.g, "beta2")}


class Definition(NamedTuple):
    """An update, its slots of state by the flags they need, its numbers and how it decays."""

    rule: Callable[[One], New]
    slots: Mapping[str, str]
    numbers: tuple[str, ...]
    flags: tuple[str, ...] = ()
    is_coupled: bool = True  # λp is added to the gradient; else rate · λp is taken off p


_ADAM = {"m": "", "v": "", "v_max": "amsgrad"}
_BETAS = ("beta1", "beta2")
DEFINITIONS: dict[str, Definition] = {
    "sgd": Definition(sgd, {"momentum": "momentum"}, ("momentum", "dampening"),
                      ("momentum", "nesterov")),
    "adam": Definition(adam, _ADAM, (*_BETAS, "eps"), ("amsgrad",)),
    "adamw": Definition(adam, _ADAM, (*_BETAS, "eps"), ("amsgrad",), is_coupled=False),
    "adagrad": Definition(adagrad, {"sum": ""}, ("lr_decay", "eps")),
    "rmsprop": Definition(rmsprop, {"v": "", "mean": "centered", "momentum": "momentum"},
                          ("alpha", "eps", "momentum"), ("centered", "momentum")),
    "adadelta": Definition(adadelta, {"v": "", "steps": ""}, ("rho", "eps")),
    "lion": Definition(lion, {"m": ""}, _BETAS, is_coupled=False),
}  # fmt: skip
