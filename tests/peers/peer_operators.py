"""Runs one operator of PyTorch's database in both libraries and says what differs."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peer_calls import Call, call_for
from peer_values import (
    NotRepresentableError,
    array_of,
    copied,
    mapped,
    plain,
    results_of,
    static,
    type_name,
    value_complaint,
    widened,
)
from torch.testing._internal.common_methods_invocations import op_db

import treadle as td
from treadle.base.errors import TreadleError

warnings.filterwarnings("ignore", module="torch")
# Programs hold this many samples, so that most of a compile's constant cost is shared.
TOGETHER = 12
OPERATORS = {f"{o.name}.{o.variant_test_name}" if o.variant_test_name else o.name: o for o in op_db}
DRAWN = (torch.float32, torch.int64, torch.bool, torch.uint8)


@dataclass(frozen=True)
class Outcome:
    """What came of one sample: `agrees`, or a kind of difference and where it is."""

    kind: str
    sample: str
    detail: str = ""


class Case:
    """A sample: PyTorch's call and results, and Treadle's call over the same arrays."""

    def __init__(self, op: Any, call: Call, sample: Any, label: str):
        self.op, self.call, self.label = op, call, label
        self.given = (sample.input, sample.args, sample.kwargs)
        self.leaves: list[torch.Tensor] = []
        mapped(self.given, self.leaves.append)
        self.arrays = [array_of(t) for t in self.leaves]
        self.statics = static(self.given)
        self.wanted = [i for i, t in enumerate(self.leaves) if t.requires_grad]

    def reference(self, change: Any) -> tuple[list[Any], list[Any]]:
        """PyTorch's results and gradients, of its arguments changed to another dtype."""
        leaves: list[torch.Tensor] = []

        def kept(t: torch.Tensor) -> torch.Tensor:
            leaves.append(change(t))
            return leaves[-1]

        x, args, kwargs = mapped(self.given, kept)
        results = results_of(self.op.op(x, *args, **kwargs))
        tensors = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        wanted = [leaves[i] for i in self.wanted]
        if not tensors or not wanted or any(r.is_complex() for r in tensors):
            return results, []
        cts = [torch.from_numpy(cotangent(tuple(r.shape))).to(r.dtype) for r in tensors]
        found = torch.autograd.grad(tensors, wanted, cts, allow_unused=True)
        zeros = [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted)]
        return results, zeros

    def run(self, leaves: list[Any]) -> Any:
        """Treadle's call on its own tensors."""
        each = iter(leaves)
        x, args, kwargs = mapped(self.statics, lambda t: next(each))
        return self.call(x, *args, **kwargs)

    def values_and_gradients(self, leaves: list[Any], with_gradients: bool) -> list[Any]:
        if not with_gradients:
            return [_as_tensor(r) for r in results_of(self.run(leaves))]

        def of_wanted(*parts: Any) -> list[Any]:
            whole = list(leaves)
            for i, part in zip(self.wanted, parts, strict=True):
                whole[i] = part
            return [_as_tensor(r) for r in results_of(self.run(whole))]

        values, pull = td.vjp(of_wanted, *(leaves[i] for i in self.wanted))
        cts = [
            td.cast(td.tensor(cotangent(v.shape)), v.dtype)
            if v.dtype.is_float
            else td.zeros_like(v)
            for v in values
        ]
        return [*values, *pull(cts)]


def _as_tensor(value: Any) -> Any:
    return value if isinstance(value, td.Tensor) else td.tensor(value)


def cotangent(shape: tuple[int, ...]) -> np.ndarray:
    """Numbers that no symmetry cancels, exact in float32."""
    return (np.arange(int(np.prod(shape)), dtype=np.float64) % 7 / 8 - 0.25).reshape(shape)


def names() -> list[str]:
    return sorted(OPERATORS)


def drawn(name: str, most: int | None = None, dtypes: Any = DRAWN) -> Iterator[tuple[str, Any]]:
    """Samples of an operator in each dtype, the same ones every time."""
    op = OPERATORS[name]
    for dtype in dtypes:
        if dtype not in op.dtypes:
            continue
        seed(name)
        needs = dtype.is_floating_point and op.supports_autograd
        found = op.sample_inputs("cpu", dtype, requires_grad=needs)
        for i, sample in enumerate(itertools.islice(found, most)):
            yield f"{str(dtype).removeprefix('torch.')}[{i}]", sample


def seed(name: str) -> None:
    number = sum(map(ord, name))
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def examine(
    name: str, most: int | None = None, dtypes: Any = DRAWN, is_compiled: bool = True
) -> list[Outcome]:
    """The outcome of each sample: run at once, compiled, and compiled from the plan cache."""
    op, call = OPERATORS[name], call_for(OPERATORS[name].name)
    if call is None:
        return [Outcome("absent", "")]
    found: list[Outcome] = []
    accepted: list[tuple[Case, list[Any], list[Any], bool]] = []
    for label, sample in drawn(name, most, dtypes):
        try:
            case = Case(op, call, sample, label)
            wide, narrow = case.reference(widened), case.reference(copied)
            list(map(plain, (*wide[0], *narrow[0])))
        except NotRepresentableError as error:
            found.append(Outcome("not representable", label, str(error)))
            continue
        except Exception as error:  # PyTorch refuses its own sample in float64
            found.append(
                Outcome(
                    "not representable", label, f"PyTorch: {type(error).__name__} {error}"[:200]
                )
            )
            continue
        outcome, has_gradients = eager(case, wide, narrow)
        found.append(outcome)
        if outcome.kind in ("agrees", "gradient", "dtype"):
            expected = (
                list(map(plain, (*wide[0], *wide[1]))),
                list(map(plain, (*narrow[0], *narrow[1]))),
            )
            accepted.append((case, *expected, has_gradients and outcome.kind != "gradient"))
    for start in range(0, len(accepted) if is_compiled else 0, TOGETHER):
        found += compiled(accepted[start : start + TOGETHER])
    return found


def eager(case: Case, wide: Any, narrow: Any) -> tuple[Outcome, bool]:
    """The outcome of a call at once, and whether it has gradients to compare."""
    leaves = [td.tensor(a) for a in case.arrays]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = results_of(case.run(leaves))
    except NotRepresentableError as error:
        return Outcome("not representable", case.label, str(error)), False
    except TreadleError as error:
        return Outcome("refused", case.label, f"{_shown(case)}: {error}"), False
    except Exception as error:
        return Outcome("raw", case.label, f"{_shown(case)}: {type(error).__name__}: {error}"), False
    complaint = _compared(values, wide[0], narrow[0])
    if complaint:
        return Outcome("value", case.label, f"{_shown(case)}: {complaint}"), False
    has_gradients = bool(narrow[1])
    if has_gradients:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                every = case.values_and_gradients(leaves, True)
        except TreadleError as error:
            return Outcome("gradient refused", case.label, f"{_shown(case)}: {error}"), False
        except Exception as error:
            return Outcome(
                "raw gradient", case.label, f"{_shown(case)}: {type(error).__name__}: {error}"
            ), False
        complaint = _compared(every[len(values) :], wide[1], narrow[1])
        if complaint:
            return Outcome("gradient", case.label, f"{_shown(case)}: {complaint}"), True
    types = [type_name(v) for v in values], [type_name(v) for v in narrow[0]]
    if types[0] != types[1]:
        return Outcome(
            "dtype", case.label, f"{_shown(case)}: {types[0]}, not {types[1]}"
        ), has_gradients
    return Outcome("agrees", case.label), has_gradients


def _compared(found: list[Any], wide: list[Any], narrow: list[Any]) -> str:
    if len(found) != len(narrow):
        return f"{len(found)} results, not {len(narrow)}"
    for i, (a, b, c) in enumerate(zip(found, wide, narrow, strict=True)):
        complaint = value_complaint(plain(a), plain(b), plain(c))
        if complaint:
            return f"result {i}: {complaint}"
    return ""


def compiled(cases: list[Any]) -> list[Outcome]:
    """Outcomes of cases in one program, compiled and then taken from the plan cache."""
    specs = [td.Spec(a.shape, a.dtype) for case, *_ in cases for a in case.arrays] or [
        td.Spec((1,))
    ]
    arrays = [a for case, *_ in cases for a in case.arrays] or [np.zeros(1, np.float32)]

    def every(*leaves: Any) -> list[list[Any]]:
        each, found = list(leaves), []
        for case, _, _, has_gradients in cases:
            own, each = each[: len(case.arrays)], each[len(case.arrays) :]
            found.append(case.values_and_gradients(own, has_gradients))
        return found

    found: list[Outcome] = []
    for start in ("cold", "warm"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = td.compile(every, *specs, device="cpu")
                results = program(*arrays)
        except Exception as error:
            if len(cases) > 1:
                return [o for case in cases for o in compiled([case])]
            kind = "compile refused" if isinstance(error, TreadleError) else "raw compile"
            return [
                Outcome(
                    kind,
                    cases[0][0].label,
                    f"{_shown(cases[0][0])}: {type(error).__name__}: {error}",
                )
            ]
        if start == "warm":
            assert all(p.from_cache for p in program.report.programs), (
                "the plan cache has no such program"
            )
        for (case, wide, narrow, _), own in zip(cases, results, strict=True):
            count = len(own)
            complaint = _compared(list(own), wide[:count], narrow[:count])
            if complaint:
                found.append(Outcome(f"{start} value", case.label, f"{_shown(case)}: {complaint}"))
    return found


def _shown(case: Case) -> str:
    """The arguments of a case in a line: tensors by their types."""
    x, args, kwargs = mapped(case.statics, lambda t: _Type(t))
    words = [repr(a) for a in (x, *args)] + [f"{k}={v!r}" for k, v in kwargs.items()]
    return f"{case.op.name}({', '.join(words)})"


class _Type:
    def __init__(self, t: torch.Tensor):
        self.text = f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"

    def __repr__(self) -> str:
        return self.text


def refusals(name: str) -> list[Outcome]:
    """The outcome of each call that PyTorch refuses: `refused`, `accepted` or `raw`."""
    op, call = OPERATORS[name], call_for(OPERATORS[name].name)
    if call is None or op.error_inputs_func is None:
        return []
    seed(name)
    found = []
    for i, wrong in enumerate(op.error_inputs("cpu")):
        label, sample = f"error[{i}]", wrong.sample_input
        try:
            case = Case(op, call, sample, label)
        except (NotRepresentableError, AttributeError) as error:
            found.append(Outcome("not representable", label, str(error)))
            continue
        if {"out", "device"} & sample.kwargs.keys():
            found.append(Outcome("not representable", label, "out= or device="))
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case.run([td.tensor(a) for a in case.arrays])
            found.append(
                Outcome("accepted", label, f"{_shown(case)}: PyTorch: {wrong.error_regex}")
            )
        except TreadleError as error:
            found.append(Outcome("refused", label, str(error)))
        except Exception as error:
            found.append(Outcome("raw", label, f"{_shown(case)}: {type(error).__name__}: {error}"))
    return found
