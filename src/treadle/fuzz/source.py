"""Programs as Python: definitions that run, and scripts that show a failure by themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import treadle as td
from treadle import losses, nn, optim
from treadle.fuzz.forms import FORMS, constructor, expression
from treadle.fuzz.program import GRADIENT, TRAINING, Input, Program
from treadle.kernel.machine import NATIVE

NAMESPACE: dict[str, Any] = {
    "td": td, "nn": nn, "losses": losses, "optim": optim, "np": np, "math": math,
}  # fmt: skip


def definitions(program: Program) -> str:
    """The function `function`, or the class `Model`, that a program describes."""
    if program.mode == TRAINING:
        return _model(program)
    names = ", ".join(i.name for i in program.inputs)
    body = [*_body(program), f"return [{', '.join(program.outputs)}]"]
    text = _block(f"def function({names}):", body)
    if program.mode == GRADIENT:
        text += "\n\n\n" + _block(f"def total({names}, *weights):", _total(names))
    return text


def _total(names: str) -> list[str]:
    """The outputs as one number: random weights make every element count."""
    return [
        f"floats = [y for y in function({names}) if y.dtype.is_float]",
        "return sum((td.cast(y, w.dtype) * w).sum() for y, w in zip(floats, weights))",
    ]


def _body(program: Program) -> list[str]:
    parameters = {i.name: f"self.{i.name}" for i in program.inputs if i.is_parameter}
    return [f"{step.name} = {expression(step, parameters)}" for step in program.steps]


def _model(program: Program) -> str:
    parts = [f"self.{i.name} = {_parameter(i)}" for i in program.inputs if i.is_parameter]
    layers = (step for step in program.steps if FORMS[step.form].is_layer)
    parts += [f"self.{step.name} = {constructor(step)}" for step in layers]
    names = ", ".join(["self", *(i.name for i in program.arguments)])
    body = [*_body(program), f"return {program.outputs[0]}"]
    init = _block("def __init__(self):", parts or ["pass"])
    forward = _block(f"def forward({names}):", body)
    return _block("class Model(nn.Module):", [*init.splitlines(), "", *forward.splitlines()])


def _parameter(given: Input) -> str:
    values = given.values
    return f"nn.Parameter({given.shape}, nn.init.{values.kind}({values.low}, {values.high}))"


def _block(head: str, lines: list[str]) -> str:
    return "\n".join([head, *(f"    {line}".rstrip() for line in lines)])


def defined(program: Program) -> Callable[..., Any]:
    """What a program describes: `function`, its gradient, or the class `Model`."""
    space = dict(NAMESPACE)
    exec(definitions(program), space)  # the text is the repository's or the generator's own
    if program.mode == TRAINING:
        return space["Model"]
    return td.grad(space["total"], wrt(program)) if program.mode == GRADIENT else space["function"]


def wrt(program: Program) -> tuple[int, ...]:
    """Positions of the inputs that a gradient is asked for."""
    return tuple(k for k, i in enumerate(program.inputs) if i.is_float)


# Scripts


def script(
    program: Program, device: str, about: str, allowed: float | None = None, steady: bool = True
) -> str:
    """A file that runs a program on a device and in the oracle, and exits with 1 if they differ.

    With `steady` false it compares the bits of several runs on the device instead.
    """
    compared = _comparison(program, device, allowed) if steady else _bits(program, device)
    body = [
        definitions(program),
        "",
        "",
        *_data(program),
        "",
        "",
        *_run(program),
        "",
        "",
        *compared,
    ]
    text = "\n".join(body)
    modules = [n for n in ("losses", "nn", "optim") if f"{n}." in text]
    standard = [n for n in ("math", "os", "sys") if f"{n}." in text]
    head = [
        f'"""{about}"""',
        "",
        *(f"import {name}" for name in standard),
        "",
        "import numpy as np",
        "",
        "import treadle as td",
        *([f"from treadle import {', '.join(modules)}"] if modules else []),
        "",
        "",
    ]
    return "\n".join([*head, text]) + "\n"


def _data(program: Program) -> list[str]:
    lines = [f"rng = np.random.default_rng({program.seed})"]
    if program.mode == TRAINING:
        assert program.training is not None
        entries = ", ".join(f'"{i.name}": {_drawn(i)}' for i in program.arguments)
        return [*lines, f"batches = [{{{entries}}} for _ in range({program.training.updates})]"]
    lines += [f"{i.name} = {_drawn(i)}" for i in program.inputs]
    lines.append(f"arguments = [{', '.join(i.name for i in program.inputs)}]")
    if program.mode == GRADIENT:
        lines += [
            "types = td.trace(function, *arguments).output_types",
            "weights = [rng.normal(size=t.shape).astype(np.float32) for t in types if t.is_float]",
            "arguments += weights",
        ]
    return lines


def _drawn(given: Input) -> str:
    values = given.values
    dtype = f"td.{given.dtype}.numpy" if given.dtype == "bfloat16" else f"np.{given.dtype}"
    return f"rng.{values.kind}({values.low}, {values.high}, {given.shape}).astype({dtype})"


def _options(program: Program) -> str:
    is_plain = program.target == NATIVE
    return "" if is_plain else f", options=td.CompileOptions(target={program.target!r})"


def _run(program: Program) -> list[str]:
    """The function `run`: what a program gives on a device, twice."""
    if program.mode != TRAINING:
        name = f"td.grad(total, {wrt(program)})" if program.mode == GRADIENT else "function"
        call = f"program = td.compile({name}, *arguments, device=device{_options(program)})"
        body = [call, "return program(*arguments), program(*arguments)"]
        return _block("def run(device):", body).splitlines()
    training = program.training
    assert training is not None
    more = "" if training.clip_norm is None else f", clip_norm={training.clip_norm}"
    more += "" if training.precision == "float32" else f", precision={training.precision!r}"
    given = f"Model(), loss, {training.optimizer}, batches[0], device=device{more}"
    trained = "[step(batch).loss for batch in batches] + [*step.params.values()]"
    body = [
        "loss = lambda model, batch: model(**batch)",
        f"step = td.compile_step({given}{_options(program)})",
        f"first = {trained}",
        "step.reset()",
        f"return first, {trained}",
    ]
    return _block("def run(device):", body).splitlines()


def _comparison(program: Program, device: str, allowed: float | None) -> list[str]:
    threads = program.threads[0]
    return [
        *([f'os.environ["TREADLE_THREADS"] = "{threads}"'] if threads != 1 else []),
        f'(found, _), (expected, _) = run("{device}"), run("oracle")',
        "pairs = [(np.asarray(x, float), np.asarray(y, float)) for x, y in zip(found, expected)]",
        "worst = max(float(np.abs(x - y).max(initial=0)) for x, y in pairs)",
        f"allowed = {allowed or 1e-6:.3g}  # by the contracts of the ops, at most",
        'print(f"{worst:.3g} from the oracle, {allowed:.3g} is allowed")',
        "sys.exit(not worst <= allowed)",
    ]


def _bits(program: Program, device: str) -> list[str]:
    return [
        "bits = set()",
        f"for threads in {program.threads}:",
        '    os.environ["TREADLE_THREADS"] = str(threads)',
        f'    for found in run("{device}"):',
        '        bits.add(b"".join(np.asarray(x).tobytes() for x in found))',
        'print(f"{len(bits)} different results")',
        "sys.exit(len(bits) > 1)",
    ]
