"""`compile_step` and its sibling for a backward of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.base.errors import ArgumentError
from treadle.base.numbers import FACTOR, check_number, check_seed
from treadle.base.trees import Tree
from treadle.compile_report import as_options
from treadle.frontend.tracing import function_name
from treadle.nn.tracing import as_module
from treadle.optim.optimizer import Optimizer
from treadle.pipeline import (
    Backward,
    CompileOptions,
    CompileReport,
    StepRecipe,
    choose_device,
    choose_precision,
    count_parameters,
    open_session,
)
from treadle.step.batches import check_arguments, declare_model
from treadle.step.train_step import TrainStep

MAX_MICRO_STEPS = 2**16


def compile_step(
    model: object,
    loss: Callable[..., Any],
    optimizer: Optimizer,
    batch: Tree,
    *,
    device: str = "auto",
    accumulate: int = 1,
    accumulation: str = "mean",
    clip_norm: float | None = None,
    precision: object = "float32",
    seed: int = 0,
    share: Any = None,
    options: CompileOptions | None = None,
) -> TrainStep:
    """Compile `loss(model, batch)`, its gradient and the update into one training step.

    `batch` is a tree of specs or of example arrays. `accumulate` micro-batches make one update, by
    the mean of their gradients (weighted by `td.Mean`) or, with `accumulation="sum"`, their sum.
    `share` is a step or forward whose parameters it acts on.
    """
    return _compile(
        model,
        loss,
        None,
        optimizer,
        batch,
        device,
        accumulate,
        accumulation,
        clip_norm,
        precision,
        seed,
        share,
        options,
    )


def compile_manual_step(
    model: object,
    forward: Callable[..., Any],
    backward: Backward,
    optimizer: Optimizer,
    batch: Tree,
    *,
    device: str = "auto",
    accumulate: int = 1,
    accumulation: str = "mean",
    clip_norm: float | None = None,
    seed: int = 0,
    share: Any = None,
    options: CompileOptions | None = None,
) -> TrainStep:
    """A training step with a forward and a backward of your own.

    `forward(model, batch)` gives (loss, kept), `backward(model, batch, kept)` a gradient for each
    trained parameter: a list in their order, or a dict by name. Number, names, shapes and dtypes
    are checked; that they are right is yours to assure.
    """
    return _compile(
        model,
        forward,
        backward,
        optimizer,
        batch,
        device,
        accumulate,
        accumulation,
        clip_norm,
        "float32",
        seed,
        share,
        options,
    )


def _compile(
    model: object,
    loss: Callable[..., Any],
    backward: Backward | None,
    optimizer: Optimizer,
    batch: Tree,
    device: str,
    accumulate: int,
    accumulation: str,
    clip_norm: float | None,
    precision: object,
    seed: int,
    share: Any,
    options: CompileOptions | None,
) -> TrainStep:
    seed = check_seed("compile_step", seed)
    if not isinstance(accumulate, int) or not 1 <= accumulate <= MAX_MICRO_STEPS:
        raise ArgumentError(
            "compile_step", f"accumulate = {accumulate}", f"1 to {MAX_MICRO_STEPS}."
        )
    if accumulation not in ("mean", "sum"):
        raise ArgumentError(
            "compile_step", f"accumulation is {accumulation!r}", 'Use "mean" or "sum".'
        )
    if clip_norm is not None:
        clip_norm = check_number("compile_step", "clip_norm", clip_norm, FACTOR)
    if not isinstance(optimizer, Optimizer):
        is_function = callable(optimizer)
        raise ArgumentError(
            "compile_step",
            f"the optimizer is {function_name(optimizer) if is_function else repr(optimizer)}",
            "Call it: optim.adamw(1e-3)." if is_function else "Use one of td.optim.",
        )
    check_arguments("compile_step", "the loss" if backward is None else "the forward", loss)
    module, narrow = as_module(model), choose_precision(precision)
    report = CompileReport(choose_device(device), narrow.name, count_parameters(module))
    session = open_session(report.device, share)
    with session.unless_it_fails():
        declare_model(session, module, seed)
        prefix, stream = f"step{session.owners}:", session.stream(is_step=True)
        session.owners += 1
        chosen = as_options(options)
        recipe = StepRecipe(
            module,
            loss,
            optimizer,
            prefix,
            accumulate,
            clip_norm,
            narrow,
            chosen,
            backward,
            accumulation == "sum",
        )
        if not recipe.trained():
            raise ArgumentError(
                "compile_step",
                "no parameter is trained",
                "Check requires_grad and the selectors of optim.only and optim.groups.",
            )
        return TrainStep(recipe, batch, session, report, seed, stream)
