"""State dicts: PyTorch's tensors into what Treadle holds, and what it holds as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from treadle.base.errors import ArgumentError, LoadError
from treadle.interop.torch.package import need_torch
from treadle.interop.torch.tensors import as_tensor, dtype_of, host_array
from treadle.models.model import Model
from treadle.nn.module import Declaration, Module, held, walk
from treadle.runtime.session import Session, fitted
from treadle.step.forward import Forward
from treadle.step.loading import Loaded
from treadle.step.train_step import TrainStep

Owner = TrainStep | Forward | Module


def array_of(name: str, value: Any) -> np.ndarray:
    """A copy of a tensor's values on the host, in Treadle's dtype of the same name."""
    dtype_of(name, value)
    return np.array(host_array(value.detach().cpu().contiguous()))


def load_state_dict(model: Owner, state_dict: Mapping[str, Any], strict: bool = True) -> Loaded:
    """Values of a PyTorch module's state dict, by name, all or nothing.

    `model` is a step or a compiled forward, whose values they become, or a module, whose programs
    start from them. What is missing and unexpected is returned, and refused with `strict`.
    """
    values = {str(n): _readable(v) for n, v in state_dict.items()}
    if isinstance(model, (TrainStep, Forward)):
        return model.load_params(values, strict)
    if not isinstance(model, Module):
        cause = f"{model!r} holds no values"
        raise ArgumentError("load_state_dict", cause, "Pass a step, a forward or a module.")
    found, loaded = _by_name(model, values)
    if strict and (loaded.missing or loaded.unexpected):
        cause = f"missing: {list(loaded.missing)}, unexpected: {list(loaded.unexpected)}"
        raise LoadError("load_state_dict", cause, "Load a part with strict=False.")
    if isinstance(model, Model):
        model.start_from({**model.values(), **found})
    declared = model.declarations()
    for name, array in found.items():
        declared[name].init = held(array)
    return loaded


def _readable(value: Any) -> Any:
    """A tensor as NumPy reads it: the same memory, unless it is on a GPU or narrow."""
    torch = need_torch("load_state_dict")
    if not isinstance(value, torch.Tensor):
        return value
    host = value.detach().cpu()
    return host.float().numpy() if host.dtype is torch.bfloat16 else host.numpy()


def _by_name(model: Module, values: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], Loaded]:
    """Copies that fit, by the names of declarations."""
    declared = model.declarations()
    found: dict[str, np.ndarray] = {}
    unexpected, wrong = [], []
    for name, value in values.items():
        first = name if name in declared else model.first_name(name)
        if first is None:
            unexpected.append(name)
            continue
        array = fitted(value, declared[first].type)
        if isinstance(array, str):
            wrong.append(f"{name} {array}")
        else:
            found[first] = np.array(array)
    if wrong:
        raise LoadError("load_state_dict", "; ".join(wrong), "Check that it is the same model.")
    missing = tuple(n for n in declared if n not in found)
    return found, Loaded(missing, tuple(unexpected))


def state_dict(model: Owner | Mapping[str, Any]) -> dict[str, Any]:
    """Values as PyTorch's tensors, under every name that leads to them.

    Those of a step or a compiled forward are its memory, on the host or on a GPU: a later step
    changes them, and so does writing to them. A module's are what its programs start from; arrays
    by name, as `step.params`, become tensors of the same memory.
    """
    need_torch("state_dict")
    if isinstance(model, Mapping):
        return {n: as_tensor(np.asarray(v)) for n, v in model.items()}
    module = _module(model)
    first = {id(d): n for n, d in module.declarations().items()}
    if isinstance(model, Module):
        held = {n: as_tensor(v) for n, v in module.init().items()}
    else:
        held = _memory(model.session, module.declarations())
    return {name: held[first[id(d)]] for name, d in _every_name(module)}


def _module(owner: Owner) -> Module:
    if isinstance(owner, TrainStep):
        return owner.recipe.model
    return owner.model if isinstance(owner, Forward) else owner


def _every_name(module: Module) -> list[tuple[str, Declaration]]:
    found = walk(module, "", (Module, Declaration))
    return [(name, part) for name, part in found if isinstance(part, Declaration)]


def _memory(session: Session, declared: Mapping[str, Declaration]) -> dict[str, Any]:
    if not session.memory.is_host:
        return {n: as_tensor(v) for n, v in session.shared(declared).items()}
    session.refuse_sharded("state_dict")
    with session.lock:
        held = {n: session.values[n] for n in declared}
    return {n: as_tensor(v.astype(declared[n].dtype.numpy, copy=False)) for n, v in held.items()}
