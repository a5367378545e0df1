"""L-BFGS, several iterations in one update, with a strong-Wolfe line search."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from treadle.base import dtypes
from treadle.base.dtypes import DType
from treadle.base.numbers import NOT_NEGATIVE, check_choice, check_whole, numbers
from treadle.base.trees import Tree
from treadle.frontend.coerce import as_tensor, cast, constant
from treadle.frontend.control import scan
from treadle.frontend.functions.arithmetic import (
    abs,
    eq,
    ge,
    gt,
    le,
    logical_and,
    logical_not,
    logical_or,
    lt,
    maximum,
    minimum,
    remainder,
    sqrt,
    where,
)
from treadle.frontend.functions.dynamic import dynamic_slice, dynamic_update_slice
from treadle.frontend.functions.reductions import max as max_of
from treadle.frontend.functions.reductions import sum as sum_of
from treadle.frontend.functions.shaping import concat, iota
from treadle.frontend.scopes import at_one_line
from treadle.frontend.tensor import Tensor
from treadle.optim.building import Rate, schedule_beside, zeros
from treadle.optim.optimizer import Context, Optimizer, Params
from treadle.optim.selecting import Selector, check_selector, check_selects, decays

SEARCHES = ("strong_wolfe",)
ARMIJO, CURVATURE = 1e-4, 0.9  # of the Wolfe conditions
LEAST_CURVATURE = 1e-10  # of a pair that enters the memory
State = Mapping[str, Tensor]
Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]  # a point to its loss and gradient


def lbfgs(
    lr: Rate = 1.0,
    max_iter: int = 20,
    max_eval: int | None = None,
    tolerance_grad: float = 1e-7,
    tolerance_change: float = 1e-9,
    history_size: int = 100,
    line_search_fn: str | None = None,
    weight_decay: float = 0.0,
    decay: Selector | None = None,
) -> Optimizer:
    """L-BFGS, as torch.optim.LBFGS: up to `max_iter` iterations on the batch in each update.

    An update evaluates the loss and its gradient up to `max_eval` times (by default
    `max_iter` · 5 / 4), all inside the compiled step. `line_search_fn="strong_wolfe"` searches for
    the length of each step. The memory takes 2 · `history_size` copies of the parameters.
    `weight_decay` adds ½ · weight_decay · ‖p‖² to the loss that is minimised.
    """
    given = numbers(
        "lbfgs",
        tolerance_grad=(tolerance_grad, NOT_NEGATIVE),
        tolerance_change=(tolerance_change, NOT_NEGATIVE),
        weight_decay=(weight_decay, NOT_NEGATIVE),
    )
    check_whole("lbfgs", "max_iter", max_iter)
    evaluations = max_iter * 5 // 4 if max_eval is None else max_eval
    check_whole("lbfgs", "max_eval", evaluations)
    check_whole("lbfgs", "history_size", history_size)
    if line_search_fn is not None:
        check_choice("lbfgs", "line_search_fn", line_search_fn, SEARCHES)
    schedule = schedule_beside("lbfgs", lr, given)
    check_selector("lbfgs", "decay", decay)

    def init(params: Params) -> Tree:
        check_selects("lbfgs", decay, params)
        return _first_memory(params, history_size)

    def update(grads: Params, state: Tree, params: Params, context: Context) -> tuple[Params, Tree]:
        with at_one_line():
            loss = _Loss(params, grads, context, decay)
            search = _Search(
                loss.at,
                cast(context.rate(schedule), loss.dtype),
                cast(context.hyper["tolerance_grad"], loss.dtype),
                cast(context.hyper["tolerance_change"], loss.dtype),
                max_iter,
                evaluations,
                history_size,
            )
            run = search.wolfe if line_search_fn else search.fixed
            start = _flat(params, loss.dtype)
            point, memory = run(start, loss.total(start, context.loss, grads), state)
            return _split(point, params), memory

    return Optimizer(
        "lbfgs",
        init,
        update,
        dict(schedule.hyper) | given.hyper,
        {"": schedule},
        domains=dict(schedule.domains) | given.domains,
    )


def _first_memory(params: Params, history_size: int) -> dict[str, Tree]:
    size, dtype = sum(math.prod(p.shape) for p in params.values()), _dtype(params)
    scalars = ("iterations", "step", "scale", "loss")
    return {
        **{name: constant(0, (), dtype) for name in scalars},
        "direction": constant(0, (size,), dtype),
        "gradient": constant(0, (size,), dtype),
        "gradients": constant(0, (history_size, size), dtype),  # differences of gradients, a ring
        "steps": constant(0, (history_size, size), dtype),  # and of points
        "inverses": constant(0, (history_size,), dtype),  # 1 / (y · s); 0 where there is none
        "newest": constant(0, (), dtypes.int32),  # where the next pair goes
    }


def _dtype(params: Params) -> DType:
    return functools.reduce(dtypes.promote, (p.dtype for p in params.values()), dtypes.float32)


def _flat(params: Params, dtype: DType) -> Tensor:
    return concat([cast(p.reshape((-1,)), dtype) for p in params.values()])


def _split(point: Tensor, like: Params) -> Params:
    found, start = {}, 0
    for name, p in like.items():
        stop = start + math.prod(p.shape)
        found[name] = cast(point[start:stop].reshape(p.shape), p.dtype)
        start = stop
    return found


class _Loss:
    """The loss of a batch with its weight decay, as a function of one vector."""

    def __init__(
        self, params: Params, grads: Params, context: Context, selector: Selector | None
    ) -> None:
        self.params, self.grads, self.context = params, grads, context
        self.dtype = _dtype(params)
        has_decay = {n: n in grads and decays(selector, context, n) for n in params}
        ones = {n: constant(int(has_decay[n]), p.shape, p.dtype) for n, p in params.items()}
        amount = cast(context.hyper["weight_decay"], self.dtype)
        self.decay = _flat(ones, self.dtype) * amount  # of each element

    def at(self, point: Tensor) -> tuple[Tensor, Tensor]:
        loss, slopes = self.context.evaluate_at(_split(point, self.params))
        return self.total(point, loss, self.context.clip({n: slopes[n] for n in self.grads}))

    def total(self, point: Tensor, loss: Tensor, slopes: Params) -> tuple[Tensor, Tensor]:
        """The loss and its gradient, with weight decay."""
        pull = point * self.decay
        # The loss may not reach a parameter, which then stays where it is.
        reached = {n: slopes[n] if n in slopes else zeros(p) for n, p in self.params.items()}
        penalty = 0.5 * sum_of(pull * point)
        return cast(loss, self.dtype) + penalty, _flat(reached, self.dtype) + pull


@dataclass(frozen=True, slots=True)
class _Search:
    """The iterations of one update.

    A compiled program has no early exit: loops have a fixed length, and a flag that no iteration
    clears again stops all changes. Every iteration of a loop evaluates the loss once.
    """

    evaluate: Evaluate
    rate: Tensor
    tolerance_grad: Tensor
    tolerance_change: Tensor
    max_iter: int
    max_eval: int
    history_size: int

    def fixed(self, x: Tensor, first: tuple[Tensor, Tensor], state: Tree) -> tuple[Tensor, Tree]:
        """Without a line search: each iteration moves by the rate."""
        loss, g = first
        carry = self._begun(x, loss, g, state)

        def iteration(carry: Tree, _: Tree) -> tuple[Tree, None]:
            x = carry["x"] + carry["memory"]["direction"] * carry["memory"]["step"]
            loss, g = self.evaluate(x)
            after = self._accepted(carry, x, loss, g, carry["evaluations"] + 1)
            return _chosen(carry["is_running"], after, carry), None

        # PyTorch does not evaluate after the last iteration.
        evaluated = min(self.max_iter, self.max_eval) - 1
        if evaluated:
            carry, _ = scan(iteration, carry, None, evaluated)
        x, memory = carry["x"], carry["memory"]
        if self.max_iter < self.max_eval or self.max_iter == 1:
            moved = x + memory["direction"] * memory["step"]
            x = where(carry["is_running"], moved, x)
        return x, memory

    def wolfe(self, x: Tensor, first: tuple[Tensor, Tensor], state: Tree) -> tuple[Tensor, Tree]:
        """With a search along each direction for a step with the strong Wolfe conditions."""
        loss, g = first
        carry = self._begun(x, loss, g, state)
        carry["line"] = self._line(carry)

        def iteration(carry: Tree, _: Tree) -> tuple[Tree, None]:
            return _chosen(carry["is_running"], self._searched(carry), carry), None

        carry, _ = scan(iteration, carry, None, self.max_eval)
        return carry["x"], carry["memory"]

    def _begun(self, x: Tensor, loss: Tensor, g: Tensor, state: Tree) -> dict[str, Tree]:
        """The state of the loop, with the first direction."""
        is_far = gt(_largest(g), self.tolerance_grad)
        memory = _chosen(is_far, self._directed(loss, g, state), dict(state))
        goes_down = le(sum_of(g * memory["direction"]), -self.tolerance_change)
        return {
            "x": x,
            "loss": loss,
            "g": g,
            "memory": memory,
            "iteration": as_tensor(1),
            "evaluations": as_tensor(1),
            "is_running": logical_and(is_far, goes_down),
        }

    def _accepted(
        self, carry: Tree, x: Tensor, loss: Tensor, g: Tensor, evaluations: Tensor
    ) -> dict[str, Tree]:
        """The loop's state at a new point: whether it goes on, and the next direction."""
        memory = carry["memory"]
        length = _largest(memory["direction"] * memory["step"])
        ends = functools.reduce(
            logical_or,
            (
                ge(carry["iteration"], self.max_iter),
                ge(evaluations, self.max_eval),
                le(_largest(g), self.tolerance_grad),
                le(length, self.tolerance_change),
                lt(abs(loss - memory["loss"]), self.tolerance_change),
            ),
        )
        directed = self._directed(loss, g, memory)
        goes_down = le(sum_of(g * directed["direction"]), -self.tolerance_change)
        return {
            "x": x,
            "loss": loss,
            "g": g,
            "memory": _chosen(ends, memory, directed),
            "iteration": carry["iteration"] + 1,
            "evaluations": evaluations,
            "is_running": logical_and(logical_not(ends), goes_down),
        }

    def _directed(self, loss: Tensor, g: Tensor, memory: State) -> dict[str, Tensor]:
        """The memory with the last step in it, the next direction and its first length."""
        is_first = eq(memory["iterations"], 0)
        kept = self._remembered(g, memory)
        direction = where(is_first, -g, self._recursion(g, kept))
        length = minimum(1.0, 1.0 / sum_of(abs(g)))
        return {
            **_chosen(is_first, {**memory, "scale": constant(1, (), g.dtype)}, kept),
            "iterations": memory["iterations"] + 1,
            "direction": direction,
            "step": where(is_first, length * self.rate, self.rate),
            "gradient": g,
            "loss": loss,
        }

    def _remembered(self, g: Tensor, memory: State) -> dict[str, Tensor]:
        """The memory with the pair of the last step, if the loss curves up along it."""
        y, s = g - memory["gradient"], memory["direction"] * memory["step"]
        curvature = sum_of(y * s)
        enters = gt(curvature, LEAST_CURVATURE)
        safe = where(enters, curvature, 1.0)
        newest = memory["newest"]

        def put(name: str, row: Tensor) -> Tensor:
            ring = memory[name]
            old = _row(ring, newest)
            new = where(enters, row, old).reshape((1, *ring.shape[1:]))
            return dynamic_update_slice(ring, new, _starts(ring, newest))

        after = where(enters, remainder(newest + 1, self.history_size), newest)
        scale = curvature / where(enters, sum_of(y * y), 1.0)
        return {
            **memory,
            "gradients": put("gradients", y),
            "steps": put("steps", s),
            "inverses": put("inverses", 1.0 / safe),
            "scale": where(enters, scale, memory["scale"]),
            "newest": after,
        }

    def _recursion(self, g: Tensor, memory: State) -> Tensor:
        """−H g by the two loops; pairs that are not there yet have an inverse of 0."""
        count, newest = self.history_size, memory["newest"]
        ages = iota((count,), 0, newest.dtype)
        latest = remainder(newest + (count - 1) - ages, count)  # the newest first

        def pair(i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return (
                _row(memory["gradients"], i),
                _row(memory["steps"], i),
                _row(memory["inverses"], i),
            )

        def back(q: Tree, i: Tree) -> tuple[Tensor, Tensor]:
            y, s, inverse = pair(i)
            along = sum_of(s * q) * inverse
            return q - y * along, along

        def forth(r: Tree, row: Tree) -> tuple[Tensor, None]:
            i, along = row
            y, s, inverse = pair(i)
            return r + s * (along - sum_of(y * r) * inverse), None

        q, along = scan(back, -g, latest)
        r, _ = scan(forth, q * memory["scale"], (latest, along), reverse=True)
        return r

    def _line(self, carry: Tree) -> dict[str, Tensor]:
        """A line search at its beginning: the first trial is the step in memory."""
        slope = sum_of(carry["g"] * carry["memory"]["direction"])
        zero = slope * 0
        here = {"t": zero, "f": carry["loss"], "g": carry["g"], "slope": slope}
        return {
            "trial": carry["memory"]["step"],
            "tried": as_tensor(0),
            "most": self.max_eval - carry["evaluations"],
            "zooms": as_tensor(False),
            "is_stuck": as_tensor(False),
            **{f"a.{k}": v for k, v in here.items()},  # while it brackets, the trial before
            **{f"b.{k}": v for k, v in here.items()},
        }

    def _searched(self, carry: Tree) -> dict[str, Tree]:
        """One evaluation along the direction, and what follows from it."""
        line, d = carry["line"], carry["memory"]["direction"]
        t = line["trial"]
        f, g = self.evaluate(carry["x"] + d * t)
        new = {"t": t, "f": f, "g": g, "slope": sum_of(g * d)}
        slope = sum_of(carry["g"] * d)
        is_above = gt(f, carry["loss"] + ARMIJO * t * slope)
        is_flat = le(abs(new["slope"]), -CURVATURE * slope)
        reach = _largest(d)

        bracketed = _bracketed(line, new, is_above, is_flat, carry, self.tolerance_change, reach)
        zoomed = _zoomed(line, new, is_above, is_flat, self.tolerance_change, reach)
        found = _chosen(line["zooms"], zoomed, bracketed)
        ends, best, next_line = found["ends"], found["best"], found["line"]

        evaluations = carry["evaluations"] + 1
        memory = {**carry["memory"], "step": best["t"]}
        base = {**carry, "memory": memory}
        point = carry["x"] + d * best["t"]
        after = self._accepted(base, point, best["f"], best["g"], evaluations)
        after["line"] = self._line(after)
        goes_on = {**carry, "evaluations": evaluations, "line": next_line}
        return _chosen(ends, after, goes_on)


def _bracketed(
    line: State,
    new: State,
    is_above: Tensor,
    is_flat: Tensor,
    carry: Tree,
    tolerance: Tensor,
    reach: Tensor,
) -> dict[str, Tree]:
    """After a trial while no bracket is known: accept it, have a bracket, or go further."""
    before = _end(line, "a")
    is_last = ge(line["tried"], line["most"])
    rises = logical_or(is_above, logical_and(gt(line["tried"], 1), ge(new["f"], before["f"])))
    accepts = logical_and(logical_not(rises), is_flat)
    encloses = logical_and(logical_not(accepts), logical_or(rises, ge(new["slope"], 0)))

    least = new["t"] + 0.01 * (new["t"] - before["t"])
    further = _cubic(before, new, least, new["t"] * 10)
    onwards = {
        **line,
        **_named("a", new),
        "trial": further,
        "tried": line["tried"] + 1,
    }
    inside = _next_trial({**line, **_named("b", new), "zooms": as_tensor(True)}, tolerance, reach)
    origin = {"t": new["t"] * 0, "f": carry["loss"], "g": carry["g"], "slope": before["slope"]}
    lower = _chosen(le(origin["f"], new["f"]), origin, new)
    best = _chosen(is_last, lower, _chosen(accepts, new, inside["best"]))
    ends = logical_or(is_last, logical_or(accepts, logical_and(encloses, inside["ends"])))
    return {"ends": ends, "best": best, "line": _chosen(encloses, inside["line"], onwards)}


def _zoomed(
    line: State,
    new: State,
    is_above: Tensor,
    is_flat: Tensor,
    tolerance: Tensor,
    reach: Tensor,
) -> dict[str, Tree]:
    """After a trial inside the bracket: it replaces one end, or both change."""
    a, b = _end(line, "a"), _end(line, "b")
    a_is_low = le(a["f"], b["f"])
    low, high = _chosen(a_is_low, a, b), _chosen(a_is_low, b, a)
    is_worse = logical_or(is_above, ge(new["f"], low["f"]))
    points_away = ge(new["slope"] * (high["t"] - low["t"]), 0)
    turns = logical_and(logical_not(logical_or(is_worse, is_flat)), points_away)
    new_high = _chosen(is_worse, new, _chosen(turns, low, high))
    new_low = _chosen(is_worse, low, new)
    ends_of = {
        **_named("a", _chosen(a_is_low, new_low, new_high)),
        **_named("b", _chosen(a_is_low, new_high, new_low)),
    }
    tried = line["tried"] + 1
    inside = _next_trial({**line, **ends_of, "tried": tried}, tolerance, reach)
    is_found = logical_and(logical_not(is_worse), is_flat)
    is_last = ge(tried, line["most"])
    best = _chosen(is_found, new, inside["best"])
    ends = logical_or(logical_or(is_found, is_last), inside["ends"])
    return {"ends": ends, "best": best, "line": inside["line"]}


def _next_trial(line: State, tolerance: Tensor, reach: Tensor) -> dict[str, Tree]:
    """The next trial inside a bracket, away from its ends; it ends where there is no room."""
    a, b = _end(line, "a"), _end(line, "b")
    least, most = minimum(a["t"], b["t"]), maximum(a["t"], b["t"])
    trial = _cubic(a, b, least, most)
    margin = 0.1 * (most - least)
    is_near = lt(minimum(most - trial, trial - least), margin)
    is_outside = logical_or(ge(trial, most), le(trial, least))
    moves = logical_and(is_near, logical_or(line["is_stuck"], is_outside))
    is_high = lt(abs(trial - most), abs(trial - least))
    moved = where(is_high, most - margin, least + margin)
    after = {
        **line,
        "trial": where(moves, moved, trial),
        "is_stuck": logical_and(is_near, logical_not(moves)),
    }
    has_no_room = lt((most - least) * reach, tolerance)
    is_over = ge(line["tried"], line["most"])
    best = _chosen(le(a["f"], b["f"]), a, b)
    return {"ends": logical_or(has_no_room, is_over), "best": best, "line": after}


def _cubic(a: State, b: State, least: Tensor, most: Tensor) -> Tensor:
    """The minimum of the cubic through two points with slopes, inside bounds."""
    a_is_left = le(a["t"], b["t"])
    left, right = _chosen(a_is_left, a, b), _chosen(a_is_left, b, a)
    gap = left["t"] - right["t"]
    d1 = a["slope"] + b["slope"] - 3 * (left["f"] - right["f"]) / where(eq(gap, 0), 1.0, gap)
    square = d1 * d1 - a["slope"] * b["slope"]
    is_real = ge(square, 0)
    d2 = sqrt(where(is_real, square, 1.0))
    below = right["slope"] - left["slope"] + 2 * d2
    part = (right["slope"] + d2 - d1) / where(eq(below, 0), 1.0, below)
    inner = minimum(maximum(right["t"] + gap * part, least), most)
    return where(is_real, inner, (least + most) * 0.5)


def _end(line: State, end: str) -> dict[str, Tensor]:
    return {key: line[f"{end}.{key}"] for key in ("t", "f", "g", "slope")}


def _named(end: str, point: State) -> dict[str, Tensor]:
    return {f"{end}.{key}": value for key, value in point.items()}


def _row(ring: Tensor, i: Tensor) -> Tensor:
    return dynamic_slice(ring, _starts(ring, i), (1, *ring.shape[1:])).reshape(ring.shape[1:])


def _starts(ring: Tensor, i: Tensor) -> Tensor:
    """Where row i begins."""
    first = i.reshape((1,))
    return first if ring.ndim == 1 else concat([first, constant(0, (ring.ndim - 1,), i.dtype)])


def _largest(x: Tensor) -> Tensor:
    return max_of(abs(x))


def _chosen(condition: Tensor, x: Tree, y: Tree) -> Tree:
    """Each tensor of one tree or the other."""
    if isinstance(x, Mapping):
        assert isinstance(y, Mapping), y
        return {key: _chosen(condition, x[key], y[key]) for key in x}
    return where(condition, x, y)
