"""Runs one module of PyTorch's database in both libraries and says what differs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from peer_operators import TOGETHER, Case, Outcome, compiled, eager, seed
from peer_values import NotRepresentableError, copied, plain, static, widened
from torch.testing._internal.common_modules import module_db

import treadle as td
from treadle import losses, nn
from treadle.base.errors import TreadleError

MODULES = {m.name: m for m in module_db}
# Losses are functions in Treadle, by the name without "Loss".
LOSSES = {
    "L1": "l1", "SmoothL1": "smooth_l1", "MSE": "mse", "KLDiv": "kl_div", "NLL": "nll", "CTC": "ctc",
    "MarginRanking": "margin_ranking", "MultiLabelMargin": "multilabel_margin",
    "MultiMargin": "multi_margin", "SoftMargin": "soft_margin", "BCE": "bce",
    "MultiLabelSoftMargin": "multilabel_soft_margin", "GaussianNLL": "gaussian_nll",
    "PoissonNLL": "poisson_nll", "HingeEmbedding": "hinge_embedding", "Huber": "huber",
    "BCEWithLogits": "bce_with_logits", "CrossEntropy": "cross_entropy",
    "CosineEmbedding": "cosine_embedding",
}  # fmt: skip
FUNCTIONS = {torch.nn.functional.gelu: td.gelu, torch.nn.functional.relu: td.relu}
FREE = ("device", "dtype", "inplace")  # of constructors: where and in what PyTorch computes


def names() -> list[str]:
    return sorted(MODULES)


def is_absent(name: str) -> bool:
    return _constructor(name.removeprefix("nn.")) is None


def examine(name: str, is_compiled: bool = True) -> list[Outcome]:
    """The outcome of each configuration, training and not: at once, compiled, and from the cache."""
    call = _constructor(name.removeprefix("nn."))
    if call is None:
        return [Outcome("absent", "")]
    found: list[Outcome] = []
    accepted = []
    for training in (True, False):
        info = MODULES[name]
        seed(name)
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for i, one in enumerate(inputs):
            label = f"{'training' if training else 'evaluation'}[{i}]"
            try:
                case = _case(name, call, one, training, label)
                wide, narrow = case.reference(widened), case.reference(copied)
                arrays = [list(map(plain, (*r, *g))) for r, g in (wide, narrow)]
            except NotRepresentableError as error:
                found.append(Outcome("not representable", label, str(error)))
                continue
            except TreadleError as error:
                found.append(Outcome("refused", label, str(error)))
                continue
            except Exception as error:
                found.append(Outcome("raw", label, f"{type(error).__name__}: {error}"))
                continue
            outcome, has_gradients = eager(case, wide, narrow)
            found.append(outcome)
            if outcome.kind in ("agrees", "dtype"):
                accepted.append((case, *arrays, has_gradients))
    for start in range(0, len(accepted) if is_compiled else 0, TOGETHER):
        found += compiled(accepted[start : start + TOGETHER])
    return found


def _constructor(name: str) -> Callable[..., Callable[..., Any]] | None:
    """What makes a call of parameters, inputs and whether the model is trained."""
    loss = LOSSES.get(name.removesuffix("Loss")) if name.endswith("Loss") else None
    if loss is not None:
        function = getattr(losses, loss)
        return lambda *given, **named: (
            lambda values, *inputs, training: function(*inputs, **_by_name(name, given, named))
        )
    if name not in dir(nn) or not inspect.isclass(getattr(nn, name)):
        return None

    def constructor(*given: Any, **named: Any) -> Callable[..., Any]:
        model = getattr(nn, name)(*given, **named)
        declared = model.declarations()

        def call(values: dict[str, Any], *inputs: Any, training: bool, **more: Any) -> Any:
            own = {n: v for n, v in values.items() if n in declared}
            return model.apply(own, *inputs, training=training, **more)

        return call

    return constructor


def _by_name(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(getattr(torch.nn, name))
    return dict(signature.bind(*given, **named).arguments) if given else named


def _case(name: str, constructor: Any, one: Any, training: bool, label: str) -> Case:
    made, given = one.constructor_input, one.forward_input
    theirs = MODULES[name].module_cls(*made.args, **made.kwargs).train(training)
    kept = {k: v for k, v in made.kwargs.items() if k not in FREE}
    call = constructor(*_plain(static(made.args)), **_plain(static(kept)))
    state = {n: t.detach().requires_grad_(t.requires_grad) for n, t in _state(theirs)}
    # PyTorch's name of the one input of most modules.
    inputs = (*given.args, *(v for k, v in given.kwargs.items() if k == "input"))
    more = {k: v for k, v in given.kwargs.items() if k != "input"}
    sample = SimpleNamespace(input=state, args=inputs, kwargs=more)

    def reference(values: Any, *inputs: Any, **more: Any) -> Any:
        return torch.func.functional_call(theirs, values, inputs, more)

    op = SimpleNamespace(op=reference, name=f"{name}({_shown(made)}).")
    return Case(op, lambda v, *x, **k: call(v, *x, training=training, **k), sample, label)


def _state(theirs: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, which have gradients, and buffers."""
    trained = dict(theirs.named_parameters())
    return [(n, trained.get(n, t)) for n, t in theirs.state_dict().items()]


def _plain(value: Any) -> Any:
    """Tensors among the arguments of a constructor as arrays, functions as Treadle's."""
    if callable(value) and value in FUNCTIONS:
        return FUNCTIONS[value]
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def _shown(made: Any) -> str:
    words = [repr(a) for a in made.args] + [f"{k}={v!r}" for k, v in made.kwargs.items()]
    return ", ".join(words)[:120]
