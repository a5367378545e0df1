"""The table of forms: each is a piece of Python over the public surface, and how it is chosen.

The text of a form is what runs and what is printed. `{0}` is the first operand, `{axis}` an
attribute as a literal, and `{op!s}` one that is inserted as it is. A layer has a second text, of
its constructor; its first one calls it as `{layer}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Formatter

from treadle.fuzz.chooser import Chooser, Proposal
from treadle.fuzz.program import Literal, Step

Rule = Callable[[Chooser], Proposal | None]


@dataclass(frozen=True, slots=True)
class Form:
    """One kind of step. A rule that cannot use what is there returns None."""

    name: str
    family: str
    text: str
    rule: Rule
    constructor: str = ""  # of a layer
    is_loss: bool = False  # gives a scalar or a td.Mean to train on

    @property
    def is_layer(self) -> bool:
        return bool(self.constructor)

    @property
    def fields(self) -> set[str]:
        """Positions and names that the texts have a place for."""
        parsed = (*Formatter().parse(self.text), *Formatter().parse(self.constructor))
        return {name for _, name, _, _ in parsed if name}

    def step(self, name: str, proposed: Proposal) -> Step:
        """A step of what was proposed, without what this form has no place for."""
        fields = self.fields
        used = [i for i in range(len(proposed.operands)) if str(i) in fields]
        attributes = {n: v for n, v in proposed.attributes.items() if n in fields}
        return Step(name, self.name, proposed.operands[: max(used, default=-1) + 1], attributes)


FORMS: dict[str, Form] = {}


def declare(form: Form) -> None:
    assert form.name not in FORMS, form.name
    FORMS[form.name] = form


def family(name: str, rule: Rule, texts: Mapping[str, str], is_loss: bool = False) -> None:
    """Forms that are chosen alike. Their names begin with the family's."""
    for short, text in texts.items():
        declare(Form(f"{name}.{short}", name, text, rule, is_loss=is_loss))


def layer(name: str, rule: Rule, constructor: str, call: str = "{layer}({0})") -> None:
    declare(Form(f"layer.{name}", "layer", call, rule, constructor))


class _Quoted:
    """A literal: its `repr` by default, its `str` where the text asks for it."""

    def __init__(self, value: Literal):
        self.value = value

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, how: str) -> str:
        return repr(self.value)


def expression(step: Step, names: Mapping[str, str]) -> str:
    """A step as Python; `names` says what operands are called where that is not their name."""
    quoted = {name: _Quoted(value) for name, value in step.attributes.items()}
    operands = [names.get(operand, operand) for operand in step.operands]
    return FORMS[step.form].text.format(*operands, layer=f"self.{step.name}", **quoted)


def constructor(step: Step) -> str:
    """The constructor of a layer as Python."""
    quoted = {name: _Quoted(value) for name, value in step.attributes.items()}
    return FORMS[step.form].constructor.format(**quoted)
