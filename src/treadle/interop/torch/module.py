"""`from_module`: a PyTorch module as a module of Treadle's, with its names and its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError, ShapeError
from treadle.base.numbers import check_choice
from treadle.frontend.coerce import as_tensor, cast, literal
from treadle.interop.torch.exported import (
    Refused,
    dtype_of,
    export,
    in_mode,
    known_input,
    program_of,
)
from treadle.interop.torch.package import need_torch
from treadle.interop.torch.program import Known, Program
from treadle.interop.torch.states import array_of
from treadle.ir.types import TensorType
from treadle.nn import init
from treadle.nn.module import Declaration, Module, Parameter, State, update

MODES = {"both": (True, False), "train": (True,), "eval": (False,)}  # whether in training


class Part(Module):
    """A submodule of an imported module: names of parameters and buffers, and of further parts."""

    def __init__(self) -> None:
        self.named: dict[str, Any] = {}

    def _parts(self) -> list[tuple[str, Any]]:
        return list(self.named.items())

    def __getattr__(self, name: str) -> Any:
        named = self.__dict__.get("named", {})
        return named[name] if name in named else super().__getattr__(name)  # type: ignore[misc]

    def train(self, mode: bool = True) -> Module:
        raise ArgumentError(
            "eval",
            "a part of an imported module has no mode of its own: the programs are exported",
            "Call eval() on that part of the PyTorch module, in training, before from_module.",
        )

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        raise ArgumentError(
            "forward",
            "a part of an imported module cannot be called: the program is exported as a whole",
            "Import that part of the PyTorch module by itself.",
        )


@dataclass(frozen=True, slots=True)
class Held:
    """An input of a program that the module has: a declaration's name, or an array."""

    value: str | np.ndarray


@dataclass(frozen=True, slots=True)
class Given:
    """An input that a call gives: a tensor's type, or the value that it was exported for."""

    name: str
    known: Known | None
    value: Any


@dataclass(frozen=True)
class Exported:
    """One mode's program, and what its inputs and results are."""

    program: Program
    inputs: tuple[Held | Given, ...]
    updates: tuple[str, ...]  # buffers that the first results are the new values of
    arguments: Any  # the tree of what a call gives
    returned: Any  # and of what it gets
    ranges: Mapping[str, tuple[float, float]]  # of the sizes that have names


class Imported(Part):
    """A PyTorch module's programs for training and evaluation, over its parameters and buffers."""

    def __init__(self, name: str, named: Mapping[str, Declaration], modes: dict[bool, Exported]):
        super().__init__()
        self.title, self.modes = name, modes
        self.found = dict(named)
        for path, declaration in named.items():
            part: Part = self
            *parents, last = path.split(".")
            for parent in parents:
                part = part.named.setdefault(parent, Part())
            part.named[last] = declaration

    def train(self, mode: bool = True) -> Module:
        return Module.train(self, mode)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        chosen = self.modes[self.training]
        leaves = _leaves(self.title, chosen, arguments, keywords)
        values = [next(leaves) if isinstance(i, Given) else self._held(i) for i in chosen.inputs]
        results = chosen.program.run(values)
        count = len(chosen.updates)
        for name, new in zip(chosen.updates, results[:count], strict=True):
            state = self.found[name]
            assert isinstance(state, State)
            update(state, new)
        return _rebuilt(results[count:], chosen.returned)

    def _held(self, held: Held) -> Any:
        value = held.value
        return literal(value) if isinstance(value, np.ndarray) else as_tensor(self.found[value])

    def __repr__(self) -> str:
        inner = super().__repr__()
        return inner.replace("Imported(", f"Imported[{self.title}](", 1)


def _leaves(title: str, chosen: Exported, arguments: Any, keywords: Any) -> Any:
    """The tensors of a call, checked against those that the module was exported with."""
    from torch.utils import _pytree as pytree

    ordered = {k: keywords[k] for k in _keyword_names(chosen) if k in keywords} | keywords
    leaves, tree = pytree.tree_flatten((tuple(arguments), ordered))
    if tree != chosen.arguments:
        raise ArgumentError(
            title,
            f"it is called with {_outline(tree)}, and was exported with "
            f"{_outline(chosen.arguments)}",
            "Call it as the example inputs were given.",
        )
    expected = [i for i in chosen.inputs if isinstance(i, Given)]
    sizes: dict[str, int] = {}
    return iter(
        [
            _checked(title, e, leaf, sizes, chosen.ranges)
            for e, leaf in zip(expected, leaves, strict=True)
        ]
    )


def _keyword_names(chosen: Exported) -> list[str]:
    by_name = chosen.arguments.children()[1]
    return list(by_name.context or ())


def _outline(tree: Any) -> str:
    arguments, keywords = tree.children()
    names = ", ".join(map(str, keywords.context or ())) or "none by name"
    return f"{arguments.num_children} arguments of {tree.num_leaves} tensors ({names})"


def _checked(
    title: str,
    given: Given,
    leaf: Any,
    sizes: dict[str, int],
    ranges: Mapping[str, tuple[float, float]],
) -> Any:
    if given.known is None:
        if leaf is not given.value and leaf != given.value:
            cause = f"{given.name} is {leaf!r}, and the program is for {given.value!r}"
            raise ArgumentError(title, cause, "Export it with that value.")
        return leaf
    x, known = as_tensor(leaf), given.known
    if x.dtype.is_float != known.dtype.is_float or not _fits(known, x.type, sizes, ranges):
        raise ShapeError(
            title,
            f"{given.name} is {x.type}, and the program is for {known}",
            "Name sizes that change in `dynamic` of from_module: see torch.export's "
            "dynamic_shapes.",
        )
    return cast(x, known.dtype)


def _fits(
    known: Known,
    given: TensorType,
    sizes: dict[str, int],
    ranges: Mapping[str, tuple[float, float]],
) -> bool:
    """Whether sizes are those of the example, and ones with a name are the same everywhere."""
    if not known.fits(given.shape):
        return False
    for size, n in zip(known.shape, given.shape, strict=True):
        low, high = ranges.get(str(size), (0, float("inf")))
        if isinstance(size, str) and (sizes.setdefault(size, n) != n or not low <= n <= high):
            return False
    return True


def _rebuilt(values: Sequence[Any], tree: Any) -> Any:
    from torch.utils import _pytree as pytree

    return pytree.tree_unflatten(list(values), tree)


def from_module(
    torch_module: Any,
    example_inputs: Any,
    dynamic: Any = None,
    *,
    keywords: Mapping[str, Any] | None = None,
    mode: str = "both",
) -> Imported:
    """A PyTorch module as a Treadle module with the same names and values, through torch.export.

    `example_inputs` is the tuple of tensors or arrays it is called with, or one of them; `keywords`
    are those it takes by name. Sizes are fixed unless `dynamic` names them, as torch.export's
    `dynamic_shapes` does. Its forward is exported in training and in evaluation, so that dropout
    and batch norm do what they do there; each traces to Treadle's ops. With the `mode` "train" or
    "eval" only one of them is, and serves for both.
    """
    torch = need_torch("from_module")
    if not isinstance(torch_module, torch.nn.Module):
        cause = f"{torch_module!r} is not a torch.nn.Module"
        raise ArgumentError(
            "from_module", cause, "Wrap a function in a module whose forward it is."
        )
    check_choice("from_module", "mode", mode, tuple(MODES))
    is_tuple = isinstance(example_inputs, (tuple, list))
    arguments = tuple(map(_example, example_inputs if is_tuple else (example_inputs,)))
    by_name = {k: _example(v) for k, v in (keywords or {}).items()}
    name = type(torch_module).__name__
    refused = Refused()
    programs = {}
    for training in MODES[mode]:
        with in_mode(torch_module, training):
            exported = export(torch_module, arguments, by_name, dynamic)
        programs[training] = exported, program_of(exported.graph_module, refused)
    refused.check(name)
    needed = {n for e, _ in programs.values() for n in e.graph_signature.buffers_to_mutate.values()}
    named = _declarations(torch_module, needed)
    modes = {t: _exported(e, p, named) for t, (e, p) in programs.items()}
    return Imported(name, named, {t: modes.get(t, modes[MODES[mode][0]]) for t in (True, False)})


def _example(value: Any) -> Any:
    """What torch.export is given for an example: arrays and types become tensors."""
    import torch

    if isinstance(value, TensorType):
        return torch.zeros(value.shape, dtype=getattr(torch, value.dtype.name))
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_example, value))
    if isinstance(value, dict):
        return {k: _example(v) for k, v in value.items()}
    return value


def _declarations(module: Any, updated: set[str]) -> dict[str, Declaration]:
    """Parameters and buffers by name; what is shared is one declaration under all its names.

    Buffers that are not in the state dict are constants, unless the program changes them.
    """
    made: dict[int, Declaration] = {}
    found: dict[str, Declaration] = {}
    saved = module.state_dict(keep_vars=True)
    for name, value in module.named_parameters(remove_duplicate=False):
        found[name] = made.setdefault(id(value), _parameter(name, value))
    for name, value in module.named_buffers(remove_duplicate=False):
        if name in saved or name in updated:
            found[name] = made.setdefault(id(value), _state(name, value))
    return {name: found[name] for name in [*saved, *found] if name in found}


def _parameter(name: str, value: Any) -> Parameter:
    array = array_of(name, value)
    dtype = dtype_of(value.dtype)
    trained = bool(value.requires_grad)
    return Parameter(array.shape, init.literal(array), requires_grad=trained, dtype=dtype)


def _state(name: str, value: Any) -> State:
    array = array_of(name, value)
    return State(array.shape, init.literal(array), dtype_of(value.dtype))


def _exported(found: Any, program: Program, named: Mapping[str, Declaration]) -> Exported:
    signature = found.graph_signature
    nodes = [n for n in found.graph.nodes if n.op == "placeholder"]
    inputs = [
        _input(found, spec, node, named)
        for spec, node in zip(signature.input_specs, nodes, strict=True)
    ]
    updates = []
    for spec in signature.output_specs:
        if spec.kind.name == "BUFFER_MUTATION":
            updates.append(spec.target)
        elif spec.kind.name != "USER_OUTPUT":
            raise ArgumentError(
                "from_module",
                f"the forward changes {spec.target or 'an input'} in place ({spec.kind.name})",
                "Return the new value instead; buffers may be changed.",
            )
    spec = found.call_spec
    return Exported(
        program, tuple(inputs), tuple(updates), spec.in_spec, spec.out_spec, _ranges(found)
    )


def _ranges(found: Any) -> dict[str, tuple[float, float]]:
    return {
        str(symbol): (float(r.lower), float(r.upper))
        for symbol, r in found.range_constraints.items()
    }


def _input(found: Any, spec: Any, node: Any, named: Mapping[str, Declaration]) -> Held | Given:
    kind = spec.kind.name
    if kind == "USER_INPUT":
        known = known_input(node.meta.get("val"))
        return Given(node.name, known, getattr(spec.arg, "value", None))
    if kind in ("PARAMETER", "BUFFER") and spec.target in named:
        return Held(spec.target)
    if kind == "BUFFER" or kind == "CONSTANT_TENSOR":
        value = found.constants.get(spec.target, found.state_dict.get(spec.target))
        return Held(array_of(spec.target, value))
    raise ArgumentError(
        "from_module", f"the program takes {spec.target!r} ({kind})", "Pass tensors only."
    )
