"""`compile_step` and its sibling for a backward of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treadle.base.dtypes import FLOAT8, DType
from treadle.base.errors import ArgumentError
from treadle.base.numbers import FACTOR, check_number, check_seed
from treadle.base.trees import Tree
from treadle.compile_report import as_options
from treadle.distributed.config import DataParallel
from treadle.distributed.launched import open_communicator
from treadle.frontend.tracing import function_name
from treadle.nn.module import Module, Parameter
from treadle.nn.tracing import as_module, count_parameters
from treadle.optim.grouping import only as select_only
from treadle.optim.optimizer import Optimizer
from treadle.optim.selecting import Selector
from treadle.pipeline import (
    Backward,
    CompileOptions,
    CompileReport,
    StepRecipe,
    choose_device,
    choose_precision,
    open_session,
)
from treadle.step.batches import check_arguments, chosen_stream
from treadle.step.first_values import begin_model
from treadle.step.parallel.programs import Parallel
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
    only: Selector | None = None,
    precision: object = "float32",
    seed: int = 0,
    share: Any = None,
    stream: int | None = None,
    parallel: DataParallel | None = None,
    options: CompileOptions | None = None,
) -> TrainStep:
    """Compile `loss(model, batch)`, its gradient and the update into one training step.

    `batch` is a tree of specs or of example arrays. `accumulate` micro-batches make one update, by
    the mean of their gradients (weighted by `td.Mean`) or, with `accumulation="sum"`, their sum.
    `only` selects the parameters that are trained, as in `optim.only`; without it they all are.
    `share` is a step or forward whose parameters it acts on; what they draw is different, unless
    both are told one `stream`. `parallel` cuts the batch into shards for several processes.
    """
    return _compile(
        _Asked(
            model=model,
            loss=loss,
            optimizer=optimizer,
            batch=batch,
            device=device,
            accumulate=accumulate,
            accumulation=accumulation,
            clip_norm=clip_norm,
            only=only,
            precision=precision,
            seed=seed,
            share=share,
            stream=stream,
            parallel=parallel,
            options=options,
        )
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
    only: Selector | None = None,
    seed: int = 0,
    share: Any = None,
    options: CompileOptions | None = None,
) -> TrainStep:
    """A training step with a forward and a backward of your own.

    `forward(model, batch)` gives (loss, kept), `backward(model, batch, kept)` a gradient for each
    trained parameter: a list in their order, or a dict by name. Number, names, shapes and dtypes
    are checked. With `verify="full"` the gradients are compared with the derivative of the loss.
    """
    return _compile(
        _Asked(
            model=model,
            loss=forward,
            backward=backward,
            optimizer=optimizer,
            batch=batch,
            device=device,
            accumulate=accumulate,
            accumulation=accumulation,
            clip_norm=clip_norm,
            only=only,
            seed=seed,
            share=share,
            options=options,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a step is to be, as it was given."""

    model: object
    loss: Callable[..., Any]
    backward: Backward | None = None
    optimizer: Optimizer
    batch: Tree
    device: str
    accumulate: int
    accumulation: str
    clip_norm: float | None
    only: Selector | None
    precision: object = "float32"
    seed: int
    share: Any
    stream: int | None = None
    parallel: DataParallel | None = None
    options: CompileOptions | None


def _checked(asked: _Asked) -> _Asked:
    """What is asked for with its numbers, or an ArgumentError for what no step can be."""
    accumulate, optimizer = asked.accumulate, asked.optimizer
    if not isinstance(accumulate, int) or not 1 <= accumulate <= MAX_MICRO_STEPS:
        raise ArgumentError(
            "compile_step", f"accumulate = {accumulate}", f"1 to {MAX_MICRO_STEPS}."
        )
    if asked.accumulation not in ("mean", "sum"):
        raise ArgumentError(
            "compile_step", f"accumulation is {asked.accumulation!r}", 'Use "mean" or "sum".'
        )
    bound = asked.clip_norm
    if bound is not None:
        bound = check_number("compile_step", "clip_norm", bound, FACTOR)
    if not isinstance(optimizer, Optimizer):
        is_function = callable(optimizer)
        raise ArgumentError(
            "compile_step",
            f"the optimizer is {function_name(optimizer) if is_function else repr(optimizer)}",
            "Call it: optim.adamw(1e-3)." if is_function else "Use one of td.optim.",
        )
    if asked.only is not None:
        optimizer = select_only(asked.only, optimizer)
    if asked.parallel is not None:
        _check_parallel(asked, asked.parallel)
    what = "the loss" if asked.backward is None else "the forward"
    check_arguments("compile_step", what, asked.loss)
    seed = check_seed("compile_step", asked.seed)
    return replace(asked, clip_norm=bound, optimizer=optimizer, seed=seed)


def _check_parallel(asked: _Asked, parallel: object) -> None:
    if not isinstance(parallel, DataParallel):
        cause = f"parallel = {parallel!r}"
        raise ArgumentError("compile_step", cause, "Pass td.DataParallel(shards=8).")
    if choose_precision(asked.precision) in FLOAT8:
        cause = "float8 with parallel: its scales follow one batch after the other"
        raise ArgumentError("compile_step", cause, "Use bfloat16.")
    if asked.accumulation == "sum":
        raise ArgumentError(
            "compile_step",
            'accumulation="sum" with parallel: shards of a batch are averaged',
            'Use accumulation="mean", and a learning rate that is as many times larger.',
        )


def _compile(given: _Asked) -> TrainStep:
    asked = _checked(given)
    module, narrow = as_module(asked.model), choose_precision(asked.precision)
    report = CompileReport(choose_device(asked.device), narrow.name, count_parameters(module))
    session = open_session(report.device, asked.share)
    session.refuse_sharded("compile_step(share=…)")
    # Another thread may run a program of the same session: not between what is undone together.
    with session.lock, session.unless_it_fails():
        first = begin_model(session, module, asked.seed)
        prefix = f"step{session.owners}:"
        stream = chosen_stream(session, asked.stream, is_step=True)
        session.owners += 1
        options = as_options(asked.options)
        if asked.parallel is not None and not session.memory.is_host:
            # Ranks that time a library's algorithms may choose different ones, of other bits.
            options = replace(options, deterministic=True)
        recipe = _recipe(asked, module, prefix, narrow, options)
        report.trained = tuple(recipe.trained())
        report.frozen = _frozen(recipe, report.trained)
        if not report.trained:
            raise ArgumentError(
                "compile_step",
                "no parameter is trained",
                "Check requires_grad, only= and the selectors of optim.only and optim.groups.",
            )
        with recipe.naming():
            if asked.parallel is None:
                return TrainStep(recipe, asked.batch, session, report, asked.seed, stream, first)
            first.write()  # ranks cut them into parts
            communicator = open_communicator(asked.parallel.transport, asked.parallel.timeout)
            parallel = Parallel.of(asked.parallel, communicator)
            return TrainStep(
                recipe, asked.batch, session, report, asked.seed, stream, first, parallel
            )


def _frozen(recipe: StepRecipe, trained: Sequence[str]) -> tuple[str, ...]:
    """Parameters of the model that a step leaves as they are."""
    with recipe.naming():
        every = [n for n, d in recipe.model.declarations().items() if isinstance(d, Parameter)]
    return tuple(name for name in every if name not in set(trained))


def _recipe(
    asked: _Asked, module: Module, prefix: str, precision: DType, options: CompileOptions
) -> StepRecipe:
    return StepRecipe(
        module,
        asked.loss,
        asked.optimizer,
        prefix,
        asked.accumulate,
        asked.clip_norm,
        precision,
        options,
        asked.backward,
        asked.accumulation == "sum",
        asked.parallel.shards if asked.parallel is not None else 0,
    )
