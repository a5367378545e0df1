"""`Module`: a description of a model. Declarations have no values; those live in the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base import dtypes
from treadle.base.arrays import lost_range
from treadle.base.dtypes import DType
from treadle.base.elsewhere import MODULE, unknown
from treadle.base.errors import ArgumentError, NameTakenError, ShapeError, TraceError
from treadle.base.memory import refuse_beyond
from treadle.base.numbers import check_seed
from treadle.base.shapes import Shape
from treadle.frontend.binding import Binding, bound, is_training, name_of, tensor_of
from treadle.frontend.coerce import as_tensor, cast
from treadle.frontend.scopes import current_trace, into_scope
from treadle.frontend.tensor import Operand, Placeholder, Tensor
from treadle.ir.graph import OutputKind
from treadle.ir.types import TensorType
from treadle.nn import init as initialisers
from treadle.nn.init import Init
from treadle.nn.spelling import takes_pytorchs


class Declaration(Placeholder):
    """What `Parameter` and `State` share: a type and how the first value is made."""

    noun = "declaration"
    read_as: DType | None = None  # what modules see, where it is held in fewer bytes

    def __init__(self, shape: Shape, init: Init, dtype: DType):
        self.type = TensorType(shape, dtype)
        self.init = init

    @property
    def shape(self) -> Shape:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return self.type.rank

    def tensor(self) -> Tensor:
        found = tensor_of(self)
        if found is None and current_trace() is not None:
            raise TraceError(
                self.noun,
                f"a {self.noun} {self.type} is in no model that is being traced: it has no value",
                "Hold it in an attribute of the model, or in a list or dict of one; call other "
                "models through model.apply(model.init(seed), ...).",
            )
        if found is None:
            raise TraceError(
                self.noun,
                f"a {self.noun} {self.type} is used outside of a compiled step: it has no value",
                "Call the model inside td.compile_step or td.compile_forward, or through "
                "model.apply(model.init(seed), ...).",
            )
        return found if self.read_as is None else cast(found, self.read_as)

    def hold(self, dtype: DType) -> None:
        """Lie in memory as another float; modules go on to compute in what it was declared as."""
        declared = self.dtype if self.read_as is None else self.read_as
        self.type = self.type.with_dtype(dtype)
        self.read_as = None if dtype is declared else declared

    def first_value(self, seed: int, name: str) -> np.ndarray:
        """The initial value, drawn from a stream of its own."""
        refuse_beyond("init", f"{name}, {self.type},", self.type.nbytes)
        value = np.asarray(self.init(self.shape, initialisers.stream(seed, name)))
        if value.shape != self.shape:
            raise ShapeError(
                "init",
                f"{name} is {self.type}, its initialiser gives the shape {value.shape}",
                "An initialiser is called with the shape it must return.",
            )
        lost = lost_range(value, self.dtype) if self.dtype.is_float else None
        if lost is not None:
            raise ArgumentError("init", f"the first value of {name} {lost}", "Scale it down.")
        return value.astype(self.dtype.numpy)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.type})"


def held(array: np.ndarray) -> Init:
    """These values, which are held once: first values are copies of them."""

    def make(shape: Shape, rng: np.random.Generator) -> np.ndarray:
        return array

    return make


class Parameter(Declaration):
    """A trained tensor: `nn.Parameter((out, in), nn.init.xavier_uniform())`.

    An array of floats in place of the shape is what it starts from. `requires_grad=False` freezes
    it; `decay=False` exempts it from weight decay.
    """

    noun = "parameter"

    def __init__(
        self,
        shape: Shape | np.ndarray | Tensor,
        init: Init = initialisers.zeros,
        requires_grad: bool = True,
        decay: bool = True,
        dtype: DType = dtypes.float32,
    ):
        if isinstance(shape, Tensor):
            shape = shape.numpy()
        if isinstance(shape, np.ndarray) and shape.dtype.kind == "f":
            init, shape = initialisers.literal(shape), shape.shape
        super().__init__(tuple(shape) if isinstance(shape, np.ndarray) else shape, init, dtype)
        if requires_grad and not self.dtype.is_float:
            raise ArgumentError(
                "Parameter", f"{self.type} cannot be trained", "Use nn.State for integers."
            )
        self.requires_grad = requires_grad
        self.decay = decay


class State(Declaration):
    """A tensor that the forward updates with `td.update`: running statistics, a cache."""

    noun = "state"

    def __init__(
        self, shape: Shape, init: Init = initialisers.zeros, dtype: DType = dtypes.float32
    ):
        super().__init__(shape, init, dtype)


def update(state: State, value: Operand) -> None:
    """Give a state its value for the next step, once per trace; it still reads as the old one."""
    _update(state, value, is_only=True)


def update_on(state: State, move: Callable[[Tensor], Tensor]) -> None:
    """Give a state `move` of its value; called again in a trace, of what it gave it before.

    So a layer that is called on several batches counts them one after the other, as in PyTorch.
    """
    state.tensor()
    _update(state, move(latest(state)), is_only=False)


def latest(state: State) -> Tensor:
    """A state's value, or the one that this trace gives it for the next step so far."""
    name, scope = name_of(state), current_trace()
    given = scope.update_of(name) if scope is not None and name else None
    return state.tensor() if given is None else given


def _update(state: State, value: Operand, is_only: bool) -> None:
    if not isinstance(state, State):
        raise ArgumentError(
            "update", f"{state!r} is not an nn.State", "Parameters change through the optimizer."
        )
    state.tensor()  # refuses a state that is used outside of a trace
    name = name_of(state)
    new = cast(as_tensor(value), state.dtype)
    if new.shape != state.shape:
        raise ShapeError(
            "update",
            f"{name or 'the state'} is {state.type}, its new value {new.type}",
            "A state keeps its shape.",
        )
    scope = current_trace()
    if not name or scope is None:
        return  # its value is explicit: there is no step to keep the new one
    if scope.is_inside_scan:
        raise TraceError(
            "update",
            f"the state {name!r} is updated inside td.scan, once for every step",
            "Carry it through the scan and update it with the last carry.",
        )
    if is_only and scope.update_of(name) is not None:
        raise NameTakenError(
            "update", f"the state {name!r} is updated twice in one trace", "Combine the updates."
        )
    scope.add_effect(OutputKind.UPDATE, name, into_scope(new, scope))


class Module:
    """Base of models. Attributes that are modules, parameters or states, or lists and dicts of
    them, are found and named by their path: "blocks.0.fc.weight".
    """

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        if cls.__module__.startswith("treadle.nn.") and "__init__" in vars(cls):
            cls.__init__ = takes_pytorchs(cls.__init__)  # type: ignore[method-assign]

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.forward(*arguments, **keywords)

    if not TYPE_CHECKING:  # mypy would take every name for one that is there

        def __getattr__(self, name: str) -> object:
            if name in MODULE:
                raise unknown(type(self).__name__, name, MODULE)
            return object.__getattribute__(self, name)  # raises what it raised before

    _stays_in_evaluation = False

    @property
    def training(self) -> bool:
        """Whether the model is being traced for training, and this module was not set to eval()."""
        return is_training() and not self._stays_in_evaluation

    def train(self, mode: bool = True) -> Module:
        """This module and all inside follow the mode of the program again; eval() if False."""
        for _, module in self.named_modules():
            module._stays_in_evaluation = not mode
        return self

    def eval(self) -> Module:
        """This module and all inside stay in evaluation, in training programs too.

        So the statistics of a frozen backbone stay, and nothing is dropped in it.
        """
        return self.train(False)

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Modules right inside this one, by name; those in lists and dicts too."""
        return ((n, part) for n, part in _direct(self) if isinstance(part, Module))

    def children(self) -> Iterator[Module]:
        return (part for _, part in self.named_children())

    def modules(self) -> Iterator[Module]:
        return (part for _, part in self.named_modules())

    def get_submodule(self, path: str) -> Module:
        """The module at a path, such as "blocks.0.fc"."""
        for name, part in self.named_modules():
            if name == path:
                return part
        known = ", ".join(n for n, _ in self.named_modules() if n) or "none"
        raise ArgumentError("get_submodule", f"there is no module {path!r}", f"There are: {known}.")

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all inside it, each once, by path."""
        seen: set[int] = set()
        for name, part in walk(self, prefix, (Module,)):
            if isinstance(part, Module) and id(part) not in seen:
                seen.add(id(part))
                yield name, part

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Parameters by path; a shared one once, under its first name."""
        yield from _declarations(self, prefix, Parameter)

    def named_states(self, prefix: str = "") -> Iterator[tuple[str, State]]:
        """States by path; a shared one once, under its first name."""
        yield from _declarations(self, prefix, State)

    def parameters(self) -> Iterator[Parameter]:
        return (p for _, p in self.named_parameters())

    def requires_grad_(self, requires_grad: bool = True) -> Module:
        """Freeze or unfreeze every parameter inside."""
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
        return self

    def _restructured(self) -> None:
        """Told when parts of the module were replaced: what was compiled of it is out of date."""

    def declarations(self) -> dict[str, Declaration]:
        """Parameters and states by name; names are unique."""
        found: dict[str, Declaration] = {}
        for name, declaration in (*self.named_parameters(), *self.named_states()):
            if name in found:
                raise NameTakenError(
                    "Module",
                    f"two declarations of {type(self).__name__} have the name {name!r}",
                    "Rename one; keys of dicts must not look like paths.",
                )
            found[name] = declaration
        return found

    def first_name(self, path: str) -> str | None:
        """The name of the parameter or state that a path leads to; None where there is none.

        What is shared can be reached by several paths, as the state dicts of PyTorch list them.
        """
        stack: list[tuple[Any, str]] = [(self, path)]
        while stack:
            part, rest = stack.pop()
            for key, child in _children(part):
                if rest == key and isinstance(child, Declaration):
                    return next(n for n, d in self.declarations().items() if d is child)
                if rest.startswith(f"{key}."):
                    stack.append((child, rest[len(key) + 1 :]))
        return None

    def init(self, seed: int = 0) -> dict[str, np.ndarray]:
        """First values of all parameters and states, by name."""
        chosen = check_seed("init", seed)
        return {n: d.first_value(chosen, n) for n, d in self.declarations().items()}

    def apply(
        self, values: Mapping[str, Any], *arguments: Any, training: bool = False, **keywords: Any
    ) -> Any:
        """Call the model with explicit values: for td.grad, td.vjp and eager runs.

        Updates of states are dropped: the values are the caller's.
        """
        declarations = self.declarations()
        _check_names(type(self).__name__, declarations, values)
        tensors: dict[int, Tensor] = {}
        for name, declaration in declarations.items():
            given = as_tensor(values[name])
            if given.shape != declaration.shape:
                raise ShapeError(
                    "apply",
                    f"{name} is {declaration.type}, got {given.type}",
                    "Pass what model.init(seed) gives.",
                )
            tensors[id(declaration)] = given
        unnamed = dict.fromkeys(tensors, "")
        with bound(Binding(tensors, unnamed, training)):
            return self(*arguments, **keywords)

    @recursive_repr()
    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}("]
        for name, part in _direct(self):
            lines.append("  " + f"{name}: {part!r}".replace("\n", "\n  "))
        return "\n".join([*lines, ")"]) if len(lines) > 1 else f"{type(self).__name__}()"

    def _parts(self) -> list[tuple[str, Any]]:
        """Where modules, parameters and states are looked for, by name."""
        return list(vars(self).items())


def _check_names(model: str, declared: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    missing = [n for n in declared if n not in values]
    unexpected = [n for n in values if n not in declared]
    if missing or unexpected:
        raise ArgumentError(
            "apply",
            f"{model}: missing {missing}, unexpected {unexpected}",
            "Pass what model.init(seed) gives.",
        )


def _declarations(module: Module, prefix: str, kind: type) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, part in walk(module, prefix, (Module, kind)):
        if isinstance(part, kind) and id(part) not in seen:
            seen.add(id(part))
            yield name, part


def walk(value: Any, path: str, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """Everything of `kinds` inside, by path, containers entered; each module entered once."""
    stack: list[tuple[str, Any]] = [(path, value)]
    entered: set[int] = set()
    while stack:
        name, part = stack.pop()
        if isinstance(part, kinds):
            yield name, part
        if isinstance(part, Module) and id(part) in entered:
            continue
        children = _children(part)
        if isinstance(part, Module):
            entered.add(id(part))
        stack += [(f"{name}.{k}" if name else str(k), c) for k, c in reversed(children)]


def _direct(part: Any) -> Iterator[tuple[str, Any]]:
    """Modules and declarations by path: those inside containers, not those inside modules."""
    for name, child in _children(part):
        if isinstance(child, (Module, Declaration)):
            yield name, child
        else:
            yield from ((f"{name}.{inner}", found) for inner, found in _direct(child))


def _children(part: Any) -> list[tuple[str, Any]]:
    if isinstance(part, Module):
        return part._parts()
    if isinstance(part, (list, tuple)):
        return [(str(i), c) for i, c in enumerate(part)]
    if isinstance(part, dict):
        return [(str(k), c) for k, c in part.items()]
    return []
