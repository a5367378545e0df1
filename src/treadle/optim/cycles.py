"""Schedules that rise and fall: restarts, one cycle, triangles."""

from __future__ import annotations

from treadle.base.errors import ArgumentError
from treadle.base.numbers import FACTOR, RATE, STEPS, Domain, check_choice, check_flag, check_whole
from treadle.frontend.functions.arithmetic import clamp, floor, ge, gt, log, lt, pow, round, where
from treadle.frontend.tensor import Tensor
from treadle.optim.schedules import Hyper, Schedule, half_cosine, made, schedule

MODES = ("triangular", "triangular2", "exp_range")
SHAPES = ("cos", "linear")
INNER = Domain("a number in (0, 1)", high=1.0, excludes_low=True, excludes_high=True)


@schedule
def cosine_restarts(peak: float, steps: int, multiply: int = 1, final: float = 0.0) -> Schedule:
    """Cosines from `peak` to `final` that start again (SGDR): `steps` long, each `multiply` longer.

    The first has `steps` updates, the next steps · multiply, and so on.
    """
    check_whole("cosine_restarts", "steps", steps)
    check_whole("cosine_restarts", "multiply", multiply)

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        length = hyper["steps"]
        if multiply == 1:
            part = count / length - floor(count / length)
        else:
            start, length = _current_cycle(count, length, multiply)
            part = (count - start) / length
        return half_cosine(part, hyper["peak"], hyper["final"])

    given = {"peak": peak, "steps": steps, "final": final}
    return made("cosine_restarts", value, given, {"peak": RATE, "steps": STEPS, "final": RATE})


def _current_cycle(count: Tensor, first: Tensor, multiply: int) -> tuple[Tensor, Tensor]:
    """Where the cycle around a count starts, and its length.

    The number n of the cycle comes from a logarithm, which may be wrong by one at a boundary: the
    starts around it, whole numbers, decide.
    """

    def power(n: Tensor) -> Tensor:
        return round(pow(float(multiply), n))

    def start(n: Tensor) -> Tensor:
        return first * round((power(n) - 1) / (multiply - 1))

    guess = floor(log(count / first * (multiply - 1) + 1) / log(float(multiply)))
    n = where(ge(count, start(guess + 1)), guess + 1, guess)
    n = where(lt(count, start(n)), n - 1, n)
    return start(n), first * power(n)


@schedule
def one_cycle(
    peak: float,
    steps: int,
    pct_start: float = 0.3,
    anneal: str = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """Up from peak / div_factor, down to that / final_div_factor, as torch's OneCycleLR.

    `pct_start` is the part of the steps spent rising; with `three_phase` as long a fall follows,
    and then the last one. Afterwards it stays at the end.
    """
    check_choice("one_cycle", "anneal", anneal, SHAPES)
    check_flag("one_cycle", three_phase=three_phase)

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        start = hyper["peak"] / hyper["div_factor"]
        end = start / hyper["final_div_factor"]
        last = hyper["steps"] - 1
        top = hyper["pct_start"] * hyper["steps"] - 1

        def between(a: Tensor, b: Tensor, begin: Tensor, stop: Tensor) -> Tensor:
            width = stop - begin
            is_there = gt(width, 0)  # a phase of no width is at its end
            inside = (count - begin) / where(is_there, width, 1.0)
            part = clamp(where(is_there, inside, 1.0), 0, 1)
            return half_cosine(part, a, b) if anneal == "cos" else a + (b - a) * part

        rising = between(start, hyper["peak"], last * 0, top)
        if not three_phase:
            return where(count <= top, rising, between(hyper["peak"], end, top, last))
        turn = hyper["pct_start"] * hyper["steps"] * 2 - 2
        falling = between(hyper["peak"], start, top, turn)
        fallen = where(count <= turn, falling, between(start, end, turn, last))
        return where(count <= top, rising, fallen)

    given = {
        "peak": peak,
        "steps": steps,
        "pct_start": pct_start,
        "div_factor": div_factor,
        "final_div_factor": final_div_factor,
    }
    domains = {
        "peak": RATE,
        "steps": STEPS,
        "pct_start": INNER,
        "div_factor": FACTOR,
        "final_div_factor": FACTOR,
    }
    found = made("one_cycle", value, given, domains)
    if three_phase and pct_start >= 0.5:
        raise ArgumentError(
            "one_cycle", f"pct_start = {pct_start} with three phases", "Two of them fit: below 0.5."
        )
    return found


@schedule
def cyclic(
    base: float,
    peak: float,
    up: int,
    down: int | None = None,
    mode: str = "triangular",
    gamma: float = 1.0,
) -> Schedule:
    """From `base` to `peak` in `up` updates and back in `down`, again and again: torch's CyclicLR.

    "triangular2" halves the height with every cycle, "exp_range" multiplies it by `gamma` with
    every update.
    """
    check_choice("cyclic", "mode", mode, MODES)

    def value(count: Tensor, hyper: Hyper) -> Tensor:
        total = hyper["up"] + hyper["down"]
        cycle = floor(count / total)
        place = count - cycle * total
        rising, falling = place / hyper["up"], (total - place) / hyper["down"]
        height = (hyper["peak"] - hyper["base"]) * where(place <= hyper["up"], rising, falling)
        if mode == "triangular2":
            height = height * pow(0.5, cycle)
        elif mode == "exp_range":
            height = height * pow(hyper["gamma"], count)
        return hyper["base"] + height

    given = {"base": base, "peak": peak, "up": up, "down": up if down is None else down}
    domains = {"base": RATE, "peak": RATE, "up": STEPS, "down": STEPS}
    return made("cyclic", value, given | {"gamma": gamma}, domains | {"gamma": FACTOR})


@schedule
def triangular(base: float, peak: float, up: int, down: int | None = None) -> Schedule:
    """From `base` to `peak` in `up` updates and back in `down`, again and again."""
    return cyclic(base, peak, up, down)
