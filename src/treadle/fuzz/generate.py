"""Random programs: a first step of each family in turn, then steps of any on what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

import treadle as td
from treadle.base.errors import TreadleError
from treadle.fuzz import catalogue as catalogue
from treadle.fuzz.chooser import MOST_ELEMENTS, MOST_RANK, Chooser
from treadle.fuzz.forms import FORMS, Form, constructor, expression
from treadle.fuzz.program import FORWARD, GRADIENT, TRAINING, Program, Step, Training
from treadle.fuzz.source import NAMESPACE, defined
from treadle.kernel.machine import LEVELS, NATIVE
from treadle.runtime.cpu.native import processor
from treadle.runtime.cpu.targets import can_run, named_target

GREATEST = 300.0  # of values: larger ones say little about rounding
TRIES = 40  # to find a step
MORE = (0, 0, 0, 1, 1, 2, 2, 3, 4, 6)  # steps after the first
MOST_TURNS = 3
_OFTEN = "reduce_broadcast reduce_twice reduce_thrice softmax norm_by_hand compound compound_matrix"
TURNS = dict.fromkeys([*_OFTEN.split(), "reduce", "cumsum", "loss_rows"], MOST_TURNS)
LANES = ("4", "8", "16")  # of this processor's, in registers or not
THREADS = ((1,), (1,), (2,), (3,), (1, 2, 3))
OPTIMIZERS = (
    "optim.sgd(0.1)",
    "optim.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=1e-2)",
    "optim.adam(0.01, eps=1e-3)",
    "optim.adamw(0.01, eps=1e-3, weight_decay=0.1)",
    "optim.adagrad(0.01, eps=1e-3)",
    "optim.rmsprop(0.01, eps=1e-2)",
    "optim.adadelta(0.5, eps=1e-2)",
    "optim.nadam(0.01, eps=1e-3)",
    "optim.radam(0.01, eps=1e-3)",
    "optim.adamax(0.01, eps=1e-3)",
    "optim.lamb(0.01, eps=1e-3)",
    "optim.lars(0.1)",
    "optim.lookahead(optim.sgd(0.1), k=2)",
    "optim.ema(optim.adam(0.01, eps=1e-3), decay=0.9)",
    "optim.schedule_free_adamw(0.01, eps=1e-3)",
    "optim.chain(optim.clip_by_value(0.1), optim.sgd(0.1, momentum=0.9))",
    "optim.chain(optim.l2_penalty(0.01), optim.sgd(0.1))",
)


def families() -> list[str]:
    """Families that a program of functions may begin with, in a fixed order."""
    return sorted({f.family for f in FORMS.values() if not f.is_layer and not f.is_loss})


def _firsts(only: Sequence[str]) -> list[str]:
    """Families in turn; those whose results are reductions that are used again come more often."""
    names = [n for n in families() if not only or n in only]
    return [name for turn in range(MOST_TURNS) for name in names if turn < TURNS.get(name, 1)]


def targets() -> tuple[str, ...]:
    """What a program may be compiled for: as `TREADLE_TARGET` says, or all that runs here."""
    if named_target(NATIVE) != NATIVE:
        return (NATIVE,)
    levels = [name for name in LEVELS if can_run(name, processor())]
    return (NATIVE, NATIVE, *levels, *LANES)


def generate(seed: int, index: int, only: Sequence[str] = (), mode: str | None = None) -> Program:
    """The program of a seed and an index: the same one, until the catalogue is changed.

    `only` names families to begin with.
    """
    rng = np.random.default_rng([seed, index])
    firsts = _firsts(only)
    first = firsts[index % len(firsts)]
    mode = mode or (FORWARD, GRADIENT, TRAINING)[int(rng.choice(3, p=(0.42, 0.4, 0.18)))]
    found = _trained(rng, first) if mode == TRAINING else _function(rng, first, mode)
    threads = THREADS[int(rng.integers(len(THREADS)))]
    values = int(rng.integers(1000))
    target = targets()[int(rng.integers(len(targets())))]  # last: machines have different ones
    return replace(found, threads=threads, seed=values, target=target)


def _function(rng: np.random.Generator, first: str, mode: str) -> Program:
    dtype = str(
        rng.choice(["float32", "float64", "bfloat16", "float16"], p=(0.82, 0.07, 0.07, 0.04))
    )
    maker = Maker(Chooser(rng, dtype))
    forms = [f for f in FORMS.values() if not f.is_layer and not f.is_loss]
    while not maker.add([f for f in forms if f.family == first]):
        pass
    for _ in range(int(rng.choice(MORE))):
        maker.add(forms)
    program = Program(tuple(maker.choose.inputs), tuple(maker.steps), maker.sinks()).trimmed()
    known = maker.choose.known
    is_smooth = any(known[o].dtype.kind not in "iub" for o in program.outputs)
    has_floats = any(i.is_float for i in program.inputs)
    return replace(program, mode=mode if is_smooth and has_floats else FORWARD)


def _trained(rng: np.random.Generator, first: str) -> Program:
    """Layers and functions in turn, and a loss of one of the last values."""
    maker = Maker(Chooser(rng, is_model=True))
    functions = [f for f in FORMS.values() if not f.is_layer and not f.is_loss]
    layers = [f for f in FORMS.values() if f.is_layer]
    losses = [f for f in FORMS.values() if f.is_loss]
    while not maker.add(
        layers if rng.random() < 0.7 else [f for f in functions if f.family == first]
    ):
        pass
    for _ in range(int(rng.choice(MORE))):
        maker.add(layers if rng.random() < 0.5 else functions)
    while not maker.add(losses):
        pass
    precision = str(rng.choice(["float32", "bfloat16", "float16"], p=(0.9, 0.06, 0.04)))
    clip = (None, None, 0.1, 10.0)[int(rng.integers(4))]
    training = Training(str(rng.choice(OPTIMIZERS)), 3, clip, precision)
    outputs = (maker.steps[-1].name,)
    made = Program(tuple(maker.choose.inputs), tuple(maker.steps), outputs, TRAINING, training)
    return _with_parameters(made.trimmed())


def _with_parameters(program: Program) -> Program:
    """Something must be trained: where no layer has parameters, every float input is one."""
    if list(defined(program)().parameters()):
        return program
    inputs = tuple(replace(i, is_parameter=i.is_float) for i in program.inputs)
    return replace(program, inputs=inputs)


class Maker:
    """Steps so far; each is evaluated as soon as it is added."""

    def __init__(self, choose: Chooser):
        self.choose, self.steps = choose, list[Step]()

    def add(self, forms: Sequence[Form]) -> bool:
        """One more step of some of these forms; False if none was found."""
        for _ in range(TRIES):
            before = len(self.choose.inputs)
            if self._add(self.choose.pick(forms)):
                return True
            self.choose.forget(before)
        return False

    def _add(self, form: Form) -> bool:
        proposed = form.rule(self.choose)
        if proposed is None:
            return False
        step = form.step(f"v{len(self.steps)}", proposed)
        try:
            array = evaluate_step(step, self.choose.known)
        except TreadleError:  # what was proposed does not fit, which only the functions know
            return False
        if not _is_plain(array):
            return False
        self.steps.append(step)
        self.choose.known[step.name] = array
        return True

    def sinks(self) -> tuple[str, ...]:
        """Values that no step uses, and now and then another."""
        used = {operand for step in self.steps for operand in step.operands}
        extra = self.choose.pick(self.steps).name if self.choose.flag(0.2) else ""
        return tuple(s.name for s in self.steps if s.name not in used or s.name == extra)


def _is_plain(array: np.ndarray) -> bool:
    if not 0 < array.size <= MOST_ELEMENTS or array.ndim > MOST_RANK:
        return False
    with np.errstate(all="ignore"):
        return bool(np.all(np.abs(array.astype(np.float64)) <= GREATEST))


def evaluate_step(step: Step, known: dict[str, np.ndarray]) -> np.ndarray:
    """A step's value, eagerly, in the oracle. Layers have their first parameters."""
    space = {**NAMESPACE, **{name: td.tensor(known[name]) for name in step.operands}}
    if FORMS[step.form].is_layer:
        module = eval(constructor(step), space)
        values = module.init(0)
        call = lambda *given, **named: module.apply(values, *given, **named)  # noqa: E731
        space["self"] = SimpleNamespace(**{step.name: call})
    found = eval(expression(step, {}), space)
    return td.add(found, 0).numpy() if isinstance(found, td.Mean) else found.numpy()


def evaluated(program: Program) -> dict[str, np.ndarray]:
    """Every value of a program by name, parameters drawn like inputs."""
    rng = np.random.default_rng(program.seed)
    known = {i.name: i.values.draw(rng, i.shape).astype(i.type.numpy) for i in program.inputs}
    for step in program.steps:
        known[step.name] = evaluate_step(step, known)
    return known
