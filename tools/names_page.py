"""Writes docs/names.md: every public name that the other pages of the reference do not have.

    python tools/names_page.py

A test compares the page with what this writes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import public_names
import treadle as td
from treadle.base.dtypes import DType

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "names.md"

INTRODUCTION = """\
# Names

Every public name of `treadle`, imported as `td`, that has no page of its own in the reference:
[functions](functions.md) and the methods of tensors, [layers](layers.md),
[losses](losses-reference.md) and [metrics](metrics-reference.md) do. This page is written by
`tools/names_page.py` from the docstrings; change those and run it again."""


@dataclass(frozen=True)
class Family:
    """A section: classes listed by name."""

    title: str
    note: str
    classes: tuple[str, ...]


FAMILIES = (
    Family(
        "Compiling",
        "See [the training step](step.md).",
        (
            "CompileOptions",
            "DataParallel",
            "CompileReport",
            "StepResult",
            "RunResult",
            "EvalResult",
            "Program",
        ),
    ),
    Family("Tensors and graphs", "See [graphs](graphs.md).", ("Tensor", "Spec", "Graph", "Mean")),
    Family(
        "Training",
        "See [the trainer](trainer.md), [callbacks](callbacks.md) and [logging](logging.md).",
        ("Trainer", "History"),
    ),
    Family(
        "Around the step",
        "See [accumulation](accumulation.md), [checkpoints](checkpoints.md) and "
        "[watching](watching.md).",
        (
            "GradientAccumulator",
            "AccumulationStats",
            "CheckpointManager",
            "Checkpoint",
            "Histogram",
            "Anomaly",
        ),
    ),
)
# Folders whose names are listed here, but functions that are on the page of functions.
FOLDERS = {
    "optim": ("Optimizers: td.optim", "See [optimizers](optimizers.md)."),
    "linalg": (
        "Results of td.linalg",
        "Named tuples that its [functions](functions.md#linear-algebra) give; see "
        "[linear algebra](linear-algebra.md).",
    ),
    "distributions": (
        "Distributions: td.distributions",
        "See [distributions](distributions.md).",
    ),
    "data": ("Data: td.data", "See [data](data.md)."),
    "models": ("Models: td.models", "See [models](models.md)."),
    "callbacks": ("Callbacks: td.callbacks", "See [callbacks](callbacks.md)."),
    "loggers": ("Loggers: td.loggers", "See [logging](logging.md)."),
}


def page() -> str:
    names = {name: getattr(td, name) for name in public_names.public_names()}
    parts = [INTRODUCTION]
    for family in FAMILIES:
        parts.append(_section(family.title, family.note, [_class_row(n) for n in family.classes]))
    parts.append(_members("Methods of a training step", "step", td.TrainStep, _STEP))
    parts.append(_members("Methods of a forward", "forward", td.Forward, _FORWARD))
    parts.append(_members("Methods of an ensemble", "ensemble", td.Ensemble, _ENSEMBLE))
    parts.append(
        _members("Methods of an accumulator", "accumulator", td.GradientAccumulator, _ACCUMULATOR)
    )
    parts.append(
        _members("Methods of a checkpoint manager", "checkpoints", td.CheckpointManager, _MANAGER)
    )
    parts.append(_members("Methods of a trainer", "trainer", td.Trainer, _TRAINER))
    parts.append(_members("Methods of a history", "history", td.History, _HISTORY))
    parts.append(_members("Members of a run", "run", td.callbacks.Run, _RUN))
    parts.append(_members("Methods of a module", "model", td.nn.Module, _MODULE))
    parts += [_folder(name, *FOLDERS[name]) for name in FOLDERS]
    parts.append(_dtypes(v for v in names.values() if isinstance(v, DType)))
    errors = [n for n, v in names.items() if inspect.isclass(v) and issubclass(v, Exception)]
    parts.append(_section("Errors and warnings", _ERRORS, [_class_row(n) for n in errors]))
    parts.append(
        "`td.nn`, `td.losses`, `td.metrics`, `td.random` and the functions are on their own pages; "
        "`td.special` has those of `torch.special` by PyTorch's names. `td.tables` fills the rule "
        "tables when `treadle` is imported and has no functions."
    )
    return "\n\n".join(parts) + "\n"


def _members(title: str, variable: str, class_: type, note: str) -> str:
    """Methods and properties that have a docstring."""
    rows = []
    for name, member in vars(class_).items():
        is_call = name == "__call__"
        if (name.startswith("_") and not is_call) or not inspect.getdoc(member):
            continue
        if isinstance(member, property):
            rows.append(f"| `{variable}.{name}` | {_first_line(member)} |")
        elif inspect.isfunction(member) and member.__doc__:
            rows.append(_row(variable if is_call else f"{variable}.{name}", member, True))
    return _section(title, note, rows)


def _folder(name: str, title: str, note: str) -> str:
    """The classes and functions that a folder gives away."""
    folder: ModuleType = getattr(td, name)
    rows = []
    members = {n: m for n, m in vars(folder).items() if not n.startswith("_")}
    # A module that defines its classes has names beside them that are not for users.
    own = {n: m for n, m in members.items() if getattr(m, "__module__", "") == folder.__name__}
    classes = {n: m for n, m in own.items() if inspect.isclass(m)}
    for member_name, member in sorted((classes or members).items(), key=lambda m: m[0].lower()):
        label = f"{name}.{member_name}"
        if inspect.ismodule(member) or label in public_names.functions():
            continue
        # Made by functions, by hand as its page shows, or not at all.
        is_warning = inspect.isclass(member) and issubclass(member, Warning)
        is_made = is_dataclass(member) or inspect.isabstract(member) or is_protocol(member)
        if is_made or is_warning:
            rows.append(f"| `{label}` | {_first_line(member)} |")
        else:
            rows.append(_row(label, member))
    return _section(title, note, rows)


def is_protocol(member: Any) -> bool:
    return bool(getattr(member, "_is_protocol", False))


_STEP = (
    "What `td.compile_step` gives, a `td.TrainStep`. It also has `step.report`, a "
    "`td.CompileReport`, and `step.hyperparameters`, the optimizer's numbers by name."
)
_FORWARD = (
    "What `td.compile_forward` and `step.attach` give, a `td.Forward`. It also has `forward.graph` "
    "and `forward.report`."
)
_ENSEMBLE = (
    "What `td.ensemble` gives, a `td.Ensemble`; see [ensembles](ensembles.md). It also has "
    "`ensemble.hyperparameters`, arrays by name, `ensemble.seeds` and `ensemble.report`."
)
_ACCUMULATOR = "What `td.GradientAccumulator(steps, normalize=True, max_grad_norm=None)` gives."
_MANAGER = "What `td.CheckpointManager(folder)` gives; see [checkpoints](checkpoints.md)."
_TRAINER = "What `td.Trainer(step)` gives; see [the trainer](trainer.md)."
_HISTORY = "What `trainer.fit` gives; `history[name]` is a column as an array."
_RUN = "What every hook of a callback gets; its attributes are [there](callbacks.md#the-run)."
_MODULE = "What `nn.Module` gives to your own."
_ERRORS = "Each error has `operation`, `cause`, `remedy` and `origin`, the user's line."


def _section(title: str, note: str, rows: list[str]) -> str:
    lines = [f"## {title}", ""]
    if note:
        lines += [note, ""]
    return "\n".join([*lines, "| name | what it is |", "|---|---|", *rows])


def _row(name: str, function: Any, skip_first: bool = False) -> str:
    return f"| `{name}({_arguments(function, skip_first)})` | {_first_line(function)} |"


def _class_row(name: str) -> str:
    return f"| `td.{name}` | {_first_line(getattr(td, name))} |"


def _first_line(thing: Any) -> str:
    text = inspect.getdoc(thing)
    assert text, f"{thing} has no docstring"
    return text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _arguments(function: Any, skip_first: bool) -> str:
    shown = []
    for p in list(inspect.signature(function).parameters.values())[int(skip_first) :]:
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = "" if p.default is p.empty else f"={_default(p.default)}"
        shown.append(f"{stars}{p.name}{default}")
    return ", ".join(shown)


def _default(value: object) -> str:
    if isinstance(value, DType):
        return f"td.{value.name}"
    if inspect.isfunction(value):  # the only such defaults are initialisers
        assert value.__module__ == td.nn.init.__name__
        return f"nn.init.{value.__name__}"
    return repr(value)


def _dtypes(dtypes: Iterable[DType]) -> str:
    rows = [f"| `td.{'bool_' if d.kind == 'bool' else d.name}` | {_described(d)} |" for d in dtypes]
    return _section("Element types", "", rows)


def _described(dtype: DType) -> str:
    if dtype.kind == "bool":
        return "true or false"
    if dtype.is_float:
        return f"{dtype.bits} bits, {dtype.fraction_bits} of them the fraction"
    low, high = dtype.range()
    return f"integers from {low} to {high}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
