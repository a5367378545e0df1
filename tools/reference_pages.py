"""Writes the reference: a page each of functions, layers, losses and metrics.

    python tools/reference_pages.py

Signatures come from the code, descriptions and shapes from the docstrings, what arguments mean and
the examples from `reference/*.toml`; each example is run and what it prints is written after it. A
test compares the pages with what this writes, and another runs them.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import public_names
import treadle as td
from public_names import offered
from treadle.base.dtypes import DType

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TABLE = Path(__file__).resolve().parent / "reference"

WRITTEN = (
    "This page is written by `tools/reference_pages.py` from signatures, docstrings and "
    "`tools/reference/*.toml`; change those and run it again."
)
SHAPES = (
    "In shapes, … stands for any number of axes, and a size with a prime for another size of the "
    "same axis."
)


@dataclass(frozen=True)
class Entry:
    """A public function, layer, loss or metric."""

    name: str  # as it is written: td.exp, nn.Linear
    thing: Any
    family: str  # where its arguments are looked up first

    @property
    def heading(self) -> str:
        return self.name.removeprefix("td.")

    @property
    def namespace(self) -> str:
        """What is before its own name: td, td.random, nn."""
        return self.name.rpartition(".")[0]

    @property
    def module(self) -> str:
        return f"{self.namespace}.{family_of(self.thing)}"

    @property
    def is_layer(self) -> bool:
        return inspect.isclass(self.thing) and issubclass(self.thing, td.nn.Module)


@dataclass(frozen=True)
class Section:
    title: str
    entries: tuple[Entry, ...]
    note: str = ""


@dataclass(frozen=True)
class Page:
    path: str
    introduction: str
    setup: str  # run before the examples
    sections: tuple[Section, ...]


SECTIONS = ("shapes", "arguments", "examples", "layers", "methods")


@cache
def table() -> dict[str, dict[str, Any]]:
    """The sections of all files of the table together; a key is in one of them alone."""
    found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for path in sorted(TABLE.glob("*.toml")):
        for section, rows in tomllib.loads(path.read_text(encoding="utf-8")).items():
            again = found[section].keys() & rows.keys()
            assert not again, f"{path.name}: [{section}] has {sorted(again)} a second time"
            found[section] |= rows
    return found


# Descriptions


def described(entry: Entry) -> str:
    """The docstring as paragraphs, and how shapes follow where it does not say."""
    text = inspect.getdoc(entry.thing)
    assert text, f"{entry.name} has no docstring"
    paragraphs = [p.replace("\n", " ") for p in text.split("\n\n")]
    usual = "" if says_shapes(text) else _usual_shapes(entry)
    if usual:
        paragraphs.append(f"Shapes: {usual}")
    return "\n\n".join(paragraphs)


def says_shapes(text: str) -> bool:
    return "→" in text or "The shape stays." in text or "x's shape" in text


def _usual_shapes(entry: Entry) -> str:
    """What holds for all of a module, or for all functions that keep axes if asked to."""
    known = table()["shapes"]
    if "keepdims" in inspect.signature(entry.thing).parameters:
        return known["keepdims"]
    places = [p for p in (entry.module, entry.namespace) if p in known]
    assert places, f"{entry.name}: no shapes; write (A, B) → (A,) in its docstring"
    return known[places[0]]


# Arguments


def parameters(function: Callable[..., Any], skip: int = 0) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())[skip:]


def signature(name: str, given: list[inspect.Parameter]) -> str:
    shown, is_keyword = [], False
    for p in given:
        if p.kind is p.KEYWORD_ONLY and not is_keyword:
            if not any(q.kind is q.VAR_POSITIONAL for q in given):
                shown.append("*")
            is_keyword = True
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = "" if p.default is p.empty else f"={_default(p.default)}"
        shown.append(f"{stars}{p.name}{default}")
    return f"{name}({', '.join(shown)})"


def _default(value: object) -> str:
    if isinstance(value, DType):
        return f"td.{value.name}"
    if inspect.isfunction(value):  # the only such defaults are initialisers
        assert value.__module__ == td.nn.init.__name__
        return f"nn.init.{value.__name__}"
    if isinstance(value, float) and 0 < abs(value) < 1 and value == round(value, 5):
        return f"{value:g}"
    return repr(value)


def meaning(entry: Entry, name: str, in_call: bool = False) -> str:
    """What an argument is: of this function, of its family, or where neither says so, of all."""
    called = [f"{entry.family}.call"] if in_call else []
    places = [entry.name, entry.module, *called, entry.namespace, entry.family, "all"]
    for place in places:
        found = table()["arguments"].get(place, {}).get(name)
        if found is not None:
            return found
    raise KeyError(
        f"{entry.name}: what is {name}? Add it to [arguments] of tools/reference/*.toml."
    )


def arguments(entry: Entry) -> Iterator[str]:
    """A row for each argument of the function or constructor, and of a layer's call."""
    for p in parameters(entry.thing):
        yield f"| `{p.name}` | {meaning(entry, p.name)} |"
    if entry.is_layer:
        for p in call_parameters(entry):
            yield f"| `{p.name}` of the call | {meaning(entry, p.name, in_call=True)} |"


def call_parameters(entry: Entry) -> list[inspect.Parameter]:
    return parameters(entry.thing.forward, 1) if entry.is_layer else []


# Examples


def example(entry: Entry) -> str:
    """The lines of an example. A single expression is printed; layers have a short form."""
    kind = "layers" if entry.is_layer else "examples"
    text = table()[kind].get(entry.name)
    assert text is not None, f"{entry.name}: add an example to [{kind}] of tools/reference/*.toml"
    if isinstance(text, str):
        lines = text.strip("\n")
        return lines if "\n" in lines else f"print({lines})"
    made, *given = text
    return f"layer = {made}\nprint(layer.apply(layer.init(0), {', '.join(given)}).shape)"


class Printed:
    """What examples print: by running them, or as a page has it already."""

    def __init__(self, known: dict[str, str] | None):
        self.known, self.namespace = known, {"__name__": "example"}

    def of(self, source: str) -> str:
        if self.known is not None:
            return self.known.get(source, "(not run yet)\n")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(source, "example.py", "exec"), self.namespace)
        return out.getvalue()


def known_outputs(page: str) -> dict[str, str]:
    """What a page says that its blocks print; nothing for those without a text after them."""
    pairs = re.findall(
        r"```python\n(.*?)\n```(?:\n\n```text\n(.*?)```)?", page, re.DOTALL | re.MULTILINE
    )
    return dict(pairs)


def block(source: str, printed: Printed) -> str:
    out = printed.of(source)
    text = f"```python\n{source}\n```"
    return f"{text}\n\n```text\n{out.rstrip()}\n```" if out else text


# Pages


def entry_text(entry: Entry, printed: Printed) -> str:
    rows = list(arguments(entry))
    lines = [f"`{signature(entry.name, parameters(entry.thing))}`"]
    if entry.is_layer and call_parameters(entry):
        lines = [f"{lines[0]}, called as `{signature('layer', call_parameters(entry))}`"]
    parts = [f"### {entry.heading}", *lines, described(entry)]
    if rows:
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    return "\n\n".join([*parts, block(example(entry), printed)])


def page_text(page: Page, outputs: dict[str, str] | None = None) -> str:
    """The page; with outputs given, examples are not run."""
    printed = Printed(outputs)
    parts = [page.introduction, block(page.setup, printed)]
    for section in page.sections:
        parts.append(f"## {section.title}")
        if section.note:
            parts.append(section.note)
        parts += [entry_text(e, printed) for e in section.entries]
    if page.path == "functions.md":
        parts.append(methods_text(printed))
    return "\n\n".join(parts) + "\n"


TITLES = {
    "compile": "Compiling", "forward": "Compiling", "calibration": "Compiling",
    "ensemble": "Compiling",
    "module": "Models", "summary": "Models",
    "coerce": "Tensors and graphs", "tracing": "Tensors and graphs",
    "control": "Control flow and recomputation", "branches": "Control flow and recomputation",
    "associative": "Control flow and recomputation",
    "transforms": "Differentiation and batching", "vmap": "Differentiation and batching",
    "arithmetic": "Elementwise", "elementary": "Elementwise", "gamma": "Elementwise",
    "special": "Elementwise",
    "incomplete_gamma": "Elementwise",
    "powers": "Elementwise",
    "activations": "Activations and normalisation",
    "linear": "Matmul, convolution, attention",
    "images": "Images and signals", "pooling": "Images and signals",
    "grids": "Images and signals",
    "distances": "Norms and distances",
    "reductions": "Reductions and ordering", "statistics": "Reductions and ordering",
    "moments": "Reductions and ordering",
    "sequences": "Running results, lines and diagonals",
    "shaping": "Shapes, and tensors from nothing", "padding": "Shapes, and tensors from nothing",
    "arranging": "Shapes, and tensors from nothing",
    "dynamic": "Shapes, and tensors from nothing",
    "indexing": "Gathering and scattering", "segments": "Gathering and scattering",
    "scattering": "Gathering and scattering",
    "linalg": "Linear algebra",
    "fft": "Fourier transforms and complex numbers",
    "short_time": "Fourier transforms and complex numbers",
    "windows": "Fourier transforms and complex numbers",
    "random": "Random numbers",
}  # fmt: skip
LAYER_TITLES = {
    "module": "Modules and their parts", "containers": "Containers and shapes",
    "layers": "Linear maps, embeddings, convolutions, norms", "activations": "Activations",
    "transposed": "Transposed convolutions", "normalisation": "More norms",
    "pooling": "Pooling", "padding": "Padding", "resizing": "Resizing and windows",
    "dropout": "Dropout", "attention": "Attention", "positions": "Positions and masks",
    "transformer": "Transformers", "decoding": "Decoding", "recurrent": "Recurrent layers",
    "parametrizations": "Parametrizations",
    "lora": "Low-rank adapters",
    "bottleneck": "Bottleneck adapters",
    "quantization": "Weights of few bits",
}  # fmt: skip
LOSS_TITLES = {
    "regression": "Numbers", "classification": "Classes", "heads": "Large vocabularies",
    "distributions": "Distributions, sequences, teachers", "margins": "Margins and embeddings",
    "regions": "Masks, boxes, rare classes", "logic": "Rules", "combined": "Several losses",
}  # fmt: skip
METRIC_TITLES = {
    "metric": "The base, and groups", "means": "Means",
    "classification": "Of classes", "ranking": "Of rankings", "calibration": "Of calibration",
    "boxes": "Of boxes",
}  # fmt: skip
KNOWN_TITLES = {
    "Initialisers",
    *(t for known in (TITLES, LAYER_TITLES, LOSS_TITLES, METRIC_TITLES) for t in known.values()),
}


def title_of(name: str, thing: Any, known: dict[str, str]) -> str:
    """The section of a thing: that of `fft` for `fft.rfft`, or of the module that defines it.

    Modules without a title say what they are themselves.
    """
    family = name.rpartition(".")[0] or family_of(thing)
    if family in known:
        return known[family]
    summary = inspect.getdoc(inspect.getmodule(thing)) or family
    return summary.partition("\n")[0].partition(".")[0]


def family_of(thing: Any) -> str:
    return thing.__module__.rpartition(".")[2]


def sections(
    things: dict[str, Any], prefix: str, known: dict[str, str], family: str = ""
) -> list[Section]:
    """Things by their section, known ones first, in their order."""
    found: dict[str, list[Entry]] = {title: [] for title in known.values()}
    for name, thing in things.items():
        entry = Entry(f"{prefix}.{name}", thing, family or family_of(thing))
        found.setdefault(title_of(name, thing, known), []).append(entry)
    return [Section(t, tuple(e)) for t, e in found.items() if e]


def functions_page() -> Page:
    found = sections(public_names.functions(), "td", TITLES)
    return Page("functions.md", FUNCTIONS, SETUP, tuple(found))


def layers_page() -> Page:
    found = sections(offered(td.nn), "nn", LAYER_TITLES, "nn")
    own = tuple(Entry(f"nn.init.{n}", f, "init") for n, f in offered(td.nn.init).items())
    return Page("layers.md", LAYERS, SETUP, (*found, Section("Initialisers", own)))


def losses_page() -> Page:
    found = sections(offered(td.losses), "losses", LOSS_TITLES, "losses")
    return Page("losses-reference.md", LOSSES, SETUP, tuple(found))


def metrics_page() -> Page:
    found = sections(offered(td.metrics), "metrics", METRIC_TITLES, "metrics")
    return Page("metrics-reference.md", METRICS, SETUP, tuple(found))


def pages() -> list[Page]:
    return [functions_page(), layers_page(), losses_page(), metrics_page()]


# Methods

OPERATORS = "`+ - * / // % ** @ & | ^ ~ == != < <= > >= abs(x) len(x) x[...]`"


def methods() -> dict[str, Any]:
    """The public methods and properties of a tensor."""
    named = {n: inspect.getattr_static(td.Tensor, n) for n in dir(td.Tensor) if n[0] != "_"}
    return {n: m for n, m in named.items() if inspect.isfunction(m) or isinstance(m, property)}


def method_row(name: str, method: Any) -> str:
    function = public_names.functions().get(name)
    if isinstance(method, property):
        return f"| `x.{name}` | {_first_line(method)} |"
    shown = signature(f"x.{name}", parameters(method, 1))
    if function is method:
        return f"| `{shown}` | [td.{name}](#{name}) |"
    return f"| `{shown}` | {_first_line(method)} |"


def _first_line(thing: Any) -> str:
    text = inspect.getdoc(thing) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def method_call(name: str, method: Any) -> str | None:
    """The example of a method: from the table, or the call without arguments."""
    known = table()["methods"].get(name)
    if known is not None or isinstance(method, property):
        return known or f"x.{name}"
    needed = [p for p in parameters(method, 1) if p.default is p.empty]
    needed = [p for p in needed if p.kind is not p.VAR_POSITIONAL]
    return None if needed else f"x.{name}()"


def labelled(call: str) -> str:
    """A line that prints a call and its result, formatted as ruff does."""
    quote = "'" if '"' in call else '"'
    line = f"print({quote}{call}{quote}, {call})"
    return line if len(line) <= 100 else f"print(\n    {quote}{call}{quote},\n    {call},\n)"


def methods_text(printed: Printed) -> str:
    found = methods()
    calls = [method_call(n, m) for n, m in found.items()]
    source = "\n".join(["x = td.tensor([1.0, 4.0])", *(labelled(c) for c in calls if c)])
    rows = [method_row(n, m) for n, m in found.items()]
    head = "| method | what it is |\n|---|---|"
    return "\n\n".join(
        ["## Methods of a tensor", METHODS, "\n".join([head, *rows]), block(source, printed)]
    )


# What is missing


def missing() -> list[str]:
    """Everything that the table or a docstring still needs, one line each."""
    found = []
    for page in pages():
        titles = [s.title for s in page.sections if s.title not in KNOWN_TITLES]
        found += [f"{page.path}: give a title to the section “{t}”" for t in titles]
        for entry in (e for s in page.sections for e in s.entries):
            for check in (described, example, lambda e: list(arguments(e))):
                try:
                    check(entry)
                except (AssertionError, KeyError) as error:
                    found.append(str(error.args[0]))
    for name, method in methods().items():
        if not inspect.getdoc(method):
            found.append(f"Tensor.{name} has no docstring")
        if method_call(name, method) is None:
            found.append(f"Tensor.{name}: add a call to [methods] of tools/reference/*.toml")
    return found


def unused() -> list[str]:
    """Lines of the table that are about no public name."""
    entries = [e for page in pages() for s in page.sections for e in s.entries]
    names = {e.name for e in entries}
    families = {place for e in entries for place in (e.family, e.module, e.namespace)}
    families |= {"all", "nn.call"}
    rows = table()
    found = [n for kind in ("examples", "layers") for n in rows[kind] if n not in names]
    found += [n for n in rows["methods"] if n not in methods()]
    found += [n for n in rows["shapes"] if n not in families | {"keepdims"}]
    return found + [n for n in rows["arguments"] if n not in names | families]


SETUP = """\
import numpy as np
import treadle as td
from treadle import losses, metrics, nn, optim

np.set_printoptions(precision=4, suppress=True)"""
FUNCTIONS = f"""\
# Functions

Every function of `treadle`, imported as `td`, with its arguments, its shapes and an example, and
the methods of tensors. [Names](names.md) lists everything else. {WRITTEN}

All functions take traced and eager tensors, NumPy arrays, lists and Python numbers. Shapes
broadcast as in NumPy. Python numbers are weak: they take the dtype of the tensor they meet. An axis
may be counted from the end. {SHAPES}
Examples run eagerly, by the float64 oracle; in a compiled program the same calls are traced."""
LAYERS = f"""\
# Layers

Every layer of `treadle.nn`, with its arguments, its shapes and an example. Names, defaults and
first distributions are PyTorch's; [modules](modules.md) says how models are made of them. {WRITTEN}

`layer.init(seed)` gives first values, `layer.apply(values, x)` calls a layer with them at once.
{SHAPES}"""
LOSSES = f"""\
# Losses, one by one

Every loss of `treadle.losses` with its arguments, its shapes and an example;
[losses](losses.md) explains means, classes and large vocabularies. {WRITTEN}

A mean (`reduction="mean"`) is a `td.Mean`, which knows its weight; `.item()` is its value.
{SHAPES}"""
METRICS = f"""\
# Metrics, one by one

Every metric of `treadle.metrics` with its arguments and an example; [metrics](metrics.md) explains
how they run inside a step and add up over batches. {WRITTEN}

Called with arrays, a metric gives its value at once: `metric(scores, target, weight=None)`.
{SHAPES}"""
METHODS = (
    "What is a function of a tensor is a method too, by the same name; the first argument is the "
    f"tensor. There are also the operators {OPERATORS}, and `.shape`, `.dtype`, `.ndim`, `.size` "
    "and `.type`. The example has a line for each."
)


def main() -> None:
    lacking = [*missing(), *(f"{n}: no public name" for n in unused())]
    if lacking:
        raise SystemExit("\n".join(lacking))
    for page in pages():
        (DOCS / page.path).write_text(page_text(page), encoding="utf-8")


if __name__ == "__main__":
    main()
