"""What a service counts, as Prometheus reads it. One thread, the event loop's, writes."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

Labels = tuple[tuple[str, str], ...]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Counter:
    """Numbers that only grow, by their labels."""

    kind = "counter"

    def __init__(self, name: str, about: str):
        self.name, self.about = name, about
        self._values: dict[Labels, int] = defaultdict(int)

    def add(self, amount: int = 1, **labels: str) -> None:
        self._values[tuple(labels.items())] += amount

    def lines(self) -> Iterable[str]:
        return (f"{self.name}{_labelled(labels)} {n}" for labels, n in self._values.items())


class Gauge:
    """A number as it is when it is asked for."""

    kind = "gauge"

    def __init__(self, name: str, about: str, read: Callable[[], Mapping[Labels, float]]):
        self.name, self.about, self._read = name, about, read

    def lines(self) -> Iterable[str]:
        return (f"{self.name}{_labelled(labels)} {n:g}" for labels, n in self._read().items())


class Histogram:
    """How many observations were at most so large, by their labels."""

    kind = "histogram"

    def __init__(self, name: str, about: str, bounds: tuple[float, ...] = SECONDS):
        self.name, self.about, self.bounds = name, about, bounds
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = defaultdict(float)

    def observe(self, value: float, **labels: str) -> None:
        key = tuple(labels.items())
        counts = self._counts.setdefault(key, [0] * (len(self.bounds) + 1))
        counts[bisect_left(self.bounds, value)] += 1
        self._sums[key] += value

    def lines(self) -> Iterable[str]:
        for labels, counts in self._counts.items():
            total = 0
            for bound, count in zip((*map(_shown, self.bounds), "+Inf"), counts, strict=True):
                total += count
                yield f"{self.name}_bucket{_labelled((*labels, ('le', bound)))} {total}"
            yield f"{self.name}_sum{_labelled(labels)} {self._sums[labels]:.9g}"
            yield f"{self.name}_count{_labelled(labels)} {total}"


class Metrics:
    """All that a service counts."""

    def __init__(self) -> None:
        self.requests = Counter("treadle_requests_total", "Requests by route and status.")
        self.seconds = Histogram("treadle_request_seconds", "Seconds from headers to answer.")
        self.calls = Counter("treadle_forward_calls_total", "Calls of compiled forwards.")
        self.rows = Counter("treadle_forward_requests_total", "Requests that these calls answered.")
        self.tokens = Counter("treadle_generated_tokens_total", "Tokens that were generated.")
        self.gauges: list[Gauge] = []

    def text(self) -> str:
        every: list[Counter | Histogram | Gauge] = [
            self.requests,
            self.seconds,
            self.calls,
            self.rows,
            self.tokens,
            *self.gauges,
        ]
        lines: list[str] = []
        for metric in every:
            lines += [f"# HELP {metric.name} {metric.about}", f"# TYPE {metric.name} {metric.kind}"]
            lines += metric.lines()
        return "\n".join(lines) + "\n"


def _shown(bound: float) -> str:
    return f"{bound:g}"


def _labelled(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
