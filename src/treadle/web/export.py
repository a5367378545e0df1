"""A step, or forwards, as a folder that a browser trains or runs.

Programs are compiled anew for `webgpu-base`, which every WebGPU device has; nothing here needs one.
The folder has `bundle.json` (values, programs, launches), kernels as WGSL, values as safetensors,
the runtime and a page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np

from treadle.base import trees
from treadle.base.dtypes import DType
from treadle.base.errors import ArgumentError, DTypeError
from treadle.base.trees import Tree
from treadle.base.version import __version__
from treadle.compile_report import CompileOptions, CompileReport
from treadle.domains.philox import make_key
from treadle.ir.graph import Graph, OutputKind
from treadle.ir.types import TensorType
from treadle.nn.module import Module, Parameter
from treadle.nn.tracing import Inputs
from treadle.optim.append import Mode, trace_eval_params
from treadle.pipeline import StepRecipe, build_evaluation, build_forward, build_step
from treadle.runtime.files import encode_arrays
from treadle.runtime.session import Session, select
from treadle.web.folder import BUNDLE, LISTED, refuse_other, write_folder
from treadle.web.pages import Page, page_files
from treadle.web.programs import DEVICE, WebProgram, record_of, web_program
from treadle.web.rows import Splits, packed, rows_of

FORMAT = 1
WEIGHTS, STATE, CONSTANTS = "weights.safetensors", "state.safetensors", "constants.safetensors"
KERNELS = "kernels.wgsl"
OWN, COUNTERS = "step:", "step:counters"  # as files of a step call them
MOST_ROWS = 512  # of a batch that evaluates
HELD = frozenset("float32 bfloat16 int64 int32 uint32 int8 uint8 bool".split())


class AForward(Protocol):
    """What an export asks of a `Forward`."""

    model: Module
    function: Callable[..., Any]
    inputs: Inputs
    session: Session
    precision: DType
    training: bool
    options: CompileOptions
    _eval_params: Graph | None
    _seed: int
    _stream: int


class AStep(Protocol):
    """What an export asks of a `TrainStep`."""

    recipe: StepRecipe
    session: Session
    _inputs: Inputs

    def state_dict(self) -> Mapping[str, np.ndarray]: ...


class Shown(TypedDict, total=False):
    """What a page shows, and what else it may run.

    `data` and `held_out` are trees like the batch, with any number of rows; `forwards` are further
    programs by name, of the same parameters; `settings` are for the page's script.
    """

    data: Tree
    held_out: Tree
    forwards: Mapping[str, Any]
    title: str
    lead: str
    settings: Mapping[str, Any]


def export_step(step: AStep, folder: str | Path, page: str, shown: Shown) -> Path:
    """A page that trains. The browser goes on where the step is: all of its state goes along."""
    refuse_other(folder)  # what is wrong is said before anything is compiled
    asked = _page(page, shown)
    _check_needs(asked, shown, is_step=True)
    splits = _splits(shown, step._inputs)
    step.session.refuse_sharded("export_web")
    recipe, state = step.recipe, step.state_dict()
    seed, stream, steps, micro = _counters(state[COUNTERS])
    programs = _step_programs(step, splits.get("test"), _words(seed, stream))
    programs |= _forward_programs(step.session, shown.get("forwards", {}))
    names = {n: n for n in recipe.model.declarations()}
    names |= {n: recipe.prefix + n[len(OWN) :] for n in state if n.startswith(OWN)}
    names.pop(COUNTERS, None)
    values = {session: state[file] for file, session in names.items()}
    scale = f"{recipe.prefix}lr_scale"
    facts = {
        "step": {
            "accumulate": recipe.accumulate,
            "programs": {"update": "step", "accumulate": "accumulate"},
            "scale": {"name": scale, "value": float(values[scale])},
        },
        "counters": {
            "seed": [seed & 0xFFFFFFFF, seed >> 32],
            "stream": stream,
            "steps": steps,
            "micro": micro,
        },
    }
    export = _Export(step.session, recipe.model, programs, facts)
    export.add_values(values, {session: file for file, session in names.items()})
    export.add_rows(splits)
    return export.write(folder, asked)


def export_forward(forward: AForward, folder: str | Path, page: str, shown: Shown) -> Path:
    """A page that runs. Its programs share one set of parameters; the first is `forward`."""
    refuse_other(folder)
    asked = _page(page, shown)
    _check_needs(asked, shown, is_step=False)
    forward.session.refuse_sharded("export_web")
    forwards = {"forward": forward, **shown.get("forwards", {})}
    programs = _forward_programs(forward.session, forwards)
    facts = {"counters": {"seed": [0, 0], "stream": 0, "steps": 0, "micro": 0}}
    export = _Export(forward.session, forward.model, programs, facts)
    names = list(forward.model.declarations())
    export.add_values(forward.session.read(names), {n: n for n in names})
    return export.write(folder, asked)


def _page(name: str, shown: Shown) -> Page:
    title, lead = shown.get("title", ""), shown.get("lead", "")
    found = Page(str(name), title, lead, shown.get("settings", {}))
    page_files(found)  # which are there
    try:
        json.dumps(dict(found.settings), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        cause = f"settings are no JSON: {error}"
        remedy = "Use dicts with string keys, lists, strings, finite numbers, True, False and None."
        raise ArgumentError("export_web", cause, remedy) from error
    return found


# What a page's script asks for, beside the programs of what is exported.
NEEDS: dict[str, dict[str, tuple[str, ...]]] = {
    "digits": {"": ("data", "held_out"), "forwards": ("predict",)},
    "text": {"settings": ("letters", "context"), "forwards": ("decode",)},
}
TRAINING = ("train", "digits")


def _check_needs(page: Page, shown: Shown, is_step: bool) -> None:
    """What a visitor's browser would find missing."""
    known = list(Shown.__annotations__)
    unknown = [name for name in shown if name not in known]
    if unknown:
        cause = f"there is no argument {', '.join(unknown)}"
        raise ArgumentError("export_web", cause, f"There are: {', '.join(known)}.")
    if not is_step and (page.name in TRAINING or "data" in shown or "held_out" in shown):
        cause = f"a forward cannot train on the page {page.name!r}, nor take data"
        raise ArgumentError("export_web", cause, "Export a TrainStep, or use the page 'run'.")
    for of, names in NEEDS.get(page.name, {}).items():
        given: Mapping[str, Any] = shown.get(of, {}) if of else shown  # type: ignore[assignment]
        missing = [name for name in names if name not in given]
        if missing and (is_step or of != "forwards"):  # a forward is its own
            where = f" in {of}" if of else ""
            cause = f"the page {page.name!r} needs {', '.join(missing)}{where}"
            raise ArgumentError("export_web", cause, "Give it, or use the page 'train' or 'run'.")


def _splits(shown: Shown, inputs: Inputs) -> dict[str, dict[str, np.ndarray]]:
    """The rows to train on and those held out, as the page calls them."""
    found = {}
    if "data" in shown:
        found["train"] = train = rows_of("data", shown["data"], inputs)
        rows, batch = len(next(iter(train.values()))), inputs.types[0][1].shape[0]
        if rows < batch:
            cause = f"data has {rows} rows, and a batch has {batch}"
            raise ArgumentError("export_web", cause, "Give more rows, or compile a smaller batch.")
    if "held_out" in shown:
        found["test"] = rows_of("held_out", shown["held_out"], inputs)
    return found


def _counters(words: np.ndarray) -> tuple[int, int, int, int]:
    low, high, steps, micro, *stream = (int(w) for w in words)
    return low + (high << 32), (stream or [0])[0], steps, micro


def _words(seed: int, stream: int) -> list[int]:
    """The seed of a stream as a program's random state begins."""
    return [int(w) for w in make_key(seed, stream=stream)[:2]]


def _step_programs(
    step: AStep, held_out: Mapping[str, np.ndarray] | None, seed: list[int]
) -> dict[str, WebProgram]:
    recipe, report = step.recipe, CompileReport(DEVICE, step.recipe.precision.name, 0)
    plan = recipe.plan()
    with recipe.naming():
        graphs = build_step(recipe, plan, step._inputs, report)
    kinds = {OutputKind.METRIC, OutputKind.WEIGHT, OutputKind.UPDATE}
    results = ["loss", "weight", "grad_norm", "updated"]
    last = Mode.UPDATE if recipe.accumulate == 1 else Mode.ACCUMULATE_AND_UPDATE
    chosen = {"step": graphs[last]}
    if recipe.accumulate > 1:
        chosen["accumulate"] = graphs[Mode.ACCUMULATE]
    found = {
        name: web_program(select(graph, kinds, results), report, recipe.options, seed)
        for name, graph in chosen.items()
    }
    rows = 0 if held_out is None else len(next(iter(held_out.values())))
    for name, count in _evaluations(rows).items():
        types = tuple((n, t.with_shape((count, *t.shape[1:]))) for n, t in step._inputs.types)
        inputs = replace(step._inputs, types=types)
        with recipe.naming():
            graph = build_evaluation(recipe, inputs, trace_eval_params(plan), report)
        graph = select(graph, kinds - {OutputKind.UPDATE}, ["loss", "weight"])
        found[name] = web_program(graph, report, recipe.options.without_budget, seed)
    return found


def _evaluations(rows: int) -> dict[str, int]:
    """Programs that evaluate all rows, and how many rows each takes: one where that is enough."""
    if not rows:
        return {}
    sizes = range(min(rows, MOST_ROWS), MOST_ROWS // 2, -1) if rows > MOST_ROWS else [rows]
    even = next((size for size in sizes if rows % size == 0), None)
    if even is not None:
        return {"evaluate": even}
    return {"evaluate": MOST_ROWS, "evaluate_rest": rows % MOST_ROWS}


def _forward_programs(session: Session, forwards: Mapping[str, AForward]) -> dict[str, WebProgram]:
    found = {}
    for name, forward in forwards.items():
        if getattr(forward, "session", None) is not session:
            cause = f"{name} is {forward!r}, which has other parameters"
            remedy = "Use step.attach, or compile_forward(..., share=step)."
            raise ArgumentError("export_web", cause, remedy)
        report = CompileReport(DEVICE, forward.precision.name, 0)
        traced = build_forward(
            forward.model,
            forward.function,
            forward.inputs,
            forward.precision,
            forward.training,
            forward._eval_params,
            forward.options,
            report,
        )
        paths = trees.paths(traced.structure.rebuild(range(traced.structure.leaves)))
        graph = select(traced.graph, {OutputKind.RESULT, OutputKind.UPDATE}, ())
        seed = _words(forward._seed, forward._stream)
        found[name] = web_program(graph, report, forward.options, seed, paths)
    return found


@dataclass
class _Export:
    """The files of a folder as they come together."""

    session: Session
    model: Module
    programs: Mapping[str, WebProgram]
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.values: dict[str, dict[str, Any]] = {}

    def add_values(self, values: Mapping[str, np.ndarray], files: Mapping[str, str]) -> None:
        """Values by the session's names, and what files call them."""
        declared = self.model.declarations()
        for name in values:
            own = "parameter" if isinstance(declared.get(name), Parameter) else "state"
            self._add_value(name, files[name], own if name in declared else "step")
        beside = {n for p in self.programs.values() for n in p.state} - set(values)
        for name in sorted(beside):  # caches of forwards, which no file of the step has
            self._add_value(name, name, "cache")
        held = {**values, **self.session.read(sorted(beside))}
        arrays = {n: np.asarray(a, self.session.types[n].dtype.numpy) for n, a in held.items()}
        for name, array in arrays.items():
            _check_words(name, array)
        weights = {files[n]: a for n, a in arrays.items() if n in declared}
        rest = {files.get(n, n): a for n, a in arrays.items() if n not in declared}
        # What begins with zeros, as an optimizer's averages do, need not be fetched.
        rest = {n: a for n, a in rest.items() if a.any()}
        self.files[WEIGHTS] = encode_arrays(weights, "model")
        self.files[STATE] = encode_arrays(rest, "state of a page")

    def _add_value(self, name: str, file: str, kind: str) -> None:
        type_ = self.session.types[name]
        if type_.dtype.name not in HELD:
            cause = f"{name} is {type_}, which no browser has"
            raise DTypeError("export_web", cause, "Use float32 and int32.")
        self.values[name] = {**_described(type_), "file": file, "kind": kind}

    def add_rows(self, splits: Splits) -> None:
        if splits:
            self.facts["data"], data = packed(splits)
            self.files[self.facts["data"]["file"]] = data

    def write(self, folder: str | Path, page: Page) -> Path:
        record, source, constants = record_of(self.programs)
        self.files[KERNELS] = source.encode()
        if constants:
            self.files[CONSTANTS] = encode_arrays(constants, "constants")
        for name, facts in self.values.items():
            # What no program has, such as a parameter that nothing uses, is only saved again.
            record["values"][name] = record["values"].get(name, {}) | facts
        record["limits"] = {}  # what a device must have beyond what each has
        bundle = {
            "treadle": __version__,
            "format": FORMAT,
            "files": [n for n in (WEIGHTS, STATE, CONSTANTS) if n in self.files],
            "kernels": KERNELS,
            "page": dict(page.settings),
            **self.facts,
            **record,
        }
        files = {**page_files(page), **self.files}
        bundle[LISTED] = sorted({*files, BUNDLE})
        text = json.dumps(bundle, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return write_folder(folder, {**files, BUNDLE: text.encode()})


def _check_words(name: str, array: np.ndarray) -> None:
    """Integers of 64 bits are held in 32."""
    if array.dtype == np.int64 and array.size:
        low, high = int(array.min()), int(array.max())
        if low < -(2**31) or high >= 2**31:
            cause = f"{name} has values from {low} to {high}, and browsers hold 32 bits"
            raise DTypeError("export_web", cause, "Use int32, or smaller numbers.")


def _described(type_: TensorType) -> dict[str, Any]:
    return {"dtype": type_.dtype.name, "shape": list(type_.shape)}
