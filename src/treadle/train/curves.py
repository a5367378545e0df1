"""Curves as SVG, drawn by hand: no plotting package is needed to look at a run."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.runtime.files import as_path, write_file

Series = tuple[np.ndarray, np.ndarray]

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 40  # margins
MOST_POINTS = 600  # of a curve: about as many as there are pixels
NARROW, TINY = 1e-12, 1e-200  # ranges below are drawn as one value
ENDINGS = (".svg", ".png", ".pdf")
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")


class Plot:
    """Curves by name: steps and values. `save` writes an image file; notebooks show it."""

    def __init__(self, curves: Mapping[str, Series], log: bool = False):
        kept = {name: _finite(*curve, log) for name, curve in curves.items()}
        self.curves = {name: curve for name, curve in kept.items() if len(curve[0])}
        self.log = log
        if not self.curves:
            what = ", ".join(curves) or "no column"
            above = " above 0, which a logarithmic axis needs" if log else ""
            raise ArgumentError("plot", f"{what} has no number{above}", "Name other columns.")

    def save(self, path: str | Path) -> Path:
        """Write an image by the ending of its name: .svg, and with matplotlib .png and .pdf."""
        target = as_path("plot", path)
        ending = target.suffix.lower()
        if ending not in ENDINGS:
            raise ArgumentError(
                "plot", f"{target} has no known ending", f"End it in {', '.join(ENDINGS)}."
            )
        content = self.svg().encode() if ending == ".svg" else self._drawn(ending)
        write_file(target, lambda: content)
        return target

    def _drawn(self, ending: str) -> bytes:
        """A PNG or a PDF."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ArgumentError(
                "plot",
                f"a {ending} file needs matplotlib, which is not installed",
                'Install it: pip install "treadle[plot]". A .svg file needs no package.',
            ) from error
        figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), layout="constrained")
        axes = figure.add_subplot()
        for i, (name, curve) in enumerate(self.curves.items()):
            mark = "o" if len(curve[0]) == 1 else None
            axes.plot(*curve, marker=mark, color=COLOURS[i % len(COLOURS)], label=_plain(name))
        if self.log:
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.legend()
        written = io.BytesIO()
        figure.savefig(written, format=ending[1:], dpi=200)
        return written.getvalue()

    def _repr_svg_(self) -> str:
        return self.svg()

    def svg(self) -> str:
        """The picture as text."""
        x = _Axis.of([c[0] for c in self.curves.values()], False, (LEFT, WIDTH - RIGHT))
        y = _Axis.of([c[1] for c in self.curves.values()], self.log, (HEIGHT - BOTTOM, TOP))
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            *_frame(x, y),
        ]
        for i, (name, curve) in enumerate(self.curves.items()):
            parts += _curve(name, curve, x, y, i)
        return "\n".join([*parts, "</svg>", ""])


def _plain(name: str) -> str:
    """A label of matplotlib that is no mathematics, and not hidden by a first underscore."""
    return name.replace("$", r"\$") if not name.startswith("_") else f" {name}"


def _finite(steps: np.ndarray, values: np.ndarray, log: bool) -> Series:
    """What can be drawn, thinned out to what can be seen."""
    kept = np.isfinite(values) & ((values > 0) if log else True)
    steps, values = steps[kept], values[kept]
    if len(steps) > MOST_POINTS:
        chosen = np.linspace(0, len(steps) - 1, MOST_POINTS).round().astype(int)
        steps, values = steps[chosen], values[chosen]
    return steps, values


class _Axis:
    """Numbers to pixels, and where marks are."""

    def __init__(self, low: float, high: float, log: bool, pixels: tuple[int, int]):
        self.low, self.high, self.log, self.pixels = low, high, log, pixels

    @staticmethod
    def of(arrays: list[np.ndarray], log: bool, pixels: tuple[int, int]) -> _Axis:
        low = min(float(a.min()) for a in arrays)
        high = max(float(a.max()) for a in arrays)
        if high - low <= max(NARROW * max(abs(low), abs(high)), TINY):
            pad = 0.5 * max(abs(high), 1.0)
            low, high = (low / 2, high * 2) if log else (low - pad, high + pad)
        return _Axis(low, high, log, pixels)

    def at(self, values: np.ndarray) -> np.ndarray:
        low, high = self._scaled(np.array([self.low, self.high]))
        share = (self._scaled(values) - low) / (high - low)
        return self.pixels[0] + share * (self.pixels[1] - self.pixels[0])

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        return np.log10(values) if self.log else np.asarray(values, np.float64)

    def marks(self) -> np.ndarray:
        """Round numbers inside."""
        if self.log and math.log10(self.high / self.low) >= 2:
            exponents = np.arange(math.ceil(math.log10(self.low)), math.log10(self.high) + 1e-9)
            return 10.0**exponents
        unit = 10.0 ** math.floor(math.log10(self.high - self.low))
        count = (self.high - self.low) / unit
        unit *= 0.25 if count < 2 else 0.5 if count < 4 else 1 if count < 8 else 2
        first, last = math.ceil(self.low / unit), math.floor(self.high / unit + 1e-9)
        return unit * np.arange(first, last + 1)


def _frame(x: _Axis, y: _Axis) -> Iterator[str]:
    for mark, place in zip(x.marks(), x.at(x.marks())):
        yield _text(place, HEIGHT - BOTTOM + 18, f"{mark:g}", "middle")
    for mark, place in zip(y.marks(), y.at(y.marks())):
        yield (
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}" '
            'stroke="#d8dee4"/>'
        )
        yield _text(LEFT - 8, place + 4, f"{mark:g}", "end")
    bottom = HEIGHT - BOTTOM
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}" fill="none" stroke="#57606a"/>'
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "step", "middle")


def _curve(name: str, curve: Series, x: _Axis, y: _Axis, number: int) -> Iterator[str]:
    colour = COLOURS[number % len(COLOURS)]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.at(curve[0]), y.at(curve[1])))
    if len(curve[0]) == 1:
        place = points.split(",")
        yield f'<circle cx="{place[0]}" cy="{place[1]}" r="3" fill="{colour}"/>'
    yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    yield _text(WIDTH - RIGHT - 8, TOP + 16 + 16 * number, name, "end", colour)


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#24292f") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{_escaped(text)}</text>"
    )


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
