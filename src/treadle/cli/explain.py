"""`treadle explain FILE.py`: what the compiler made of the training steps of a file, and why."""

from __future__ import annotations

import ast
import contextlib
import json
import runpy
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from treadle.backends.registry import backend
from treadle.base.rewrites import Recognised, Rewritten
from treadle.cli.train import (
    FUNCTION,
    USAGE,
    UsageError,
    check_required,
    load_function,
    parsed,
    read_source,
    report,
    settings_of,
)
from treadle.kernel.cost import picoseconds
from treadle.step.ensemble import Ensemble
from treadle.step.train_step import TrainStep

ROWS = 12  # of a table, the largest first
BAR = 40  # characters of the longest
Explanation = dict[str, Any]  # plain values, as they are printed and as JSON


class EnoughError(BaseException):
    """A step was about to run: everything that comes before is compiled."""


def run_explain(file: str, settings: Sequence[str] = (), as_json: bool = False) -> int:
    """Compile the steps of a file and print what they became; nothing is trained."""
    try:
        steps = compiled_by(Path(file), settings)
    except UsageError as error:
        print(f"treadle explain: {error}", file=sys.stderr)
        return USAGE
    except (KeyboardInterrupt, Exception) as error:
        return report(error)
    found = [explained(step) for step in steps]
    print(json.dumps(found, indent=1) if as_json else "\n\n".join(map(shown, found)))
    return 0


def compiled_by(path: Path, settings: Sequence[str] = ()) -> list[TrainStep]:
    """The steps that a file compiles before the first one runs. What it prints is no result."""
    enough = contextlib.suppress(EnoughError)
    with contextlib.redirect_stdout(sys.stderr), _noted() as steps, enough:
        _run(path, settings)
    if not steps:
        remedy = "Let it, or its function train, call td.compile_step."
        raise UsageError(f"{path} compiles no training step. {remedy}")
    return steps


def _run(path: Path, settings: Sequence[str]) -> None:
    """The function `train` of a file, or the file itself where it has none."""
    _, tree = read_source(path)
    if not any(isinstance(n, ast.FunctionDef) and n.name == FUNCTION for n in tree.body):
        if settings:
            raise UsageError(f"{path} has no function {FUNCTION!r}: there is nothing to --set")
        before = sys.argv
        sys.argv = [str(path)]  # a script that reads its arguments has none
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise UsageError(f"{path} ended with {ended.code!r}") from ended
        finally:
            sys.argv = before
        return
    train = load_function(path)
    parameters = settings_of(train)
    values = parsed(settings, parameters, path)
    check_required(path, parameters, values)
    train(**values)


@contextlib.contextmanager
def _noted() -> Iterator[list[TrainStep]]:
    """Steps as they are compiled; whoever runs one stops there."""
    steps: list[TrainStep] = []
    running = ("__call__", "run", "evaluate")
    watched: list[tuple[type, str]] = [
        (TrainStep, name) for name in ("__init__", "gradients", *running)
    ]
    watched += [(Ensemble, name) for name in running]
    before = {at: getattr(*at) for at in watched}

    def init(self: TrainStep, *arguments: Any, **keywords: Any) -> None:
        before[TrainStep, "__init__"](self, *arguments, **keywords)
        steps.append(self)

    def stop(self: object, *arguments: Any, **keywords: Any) -> NoReturn:
        raise EnoughError

    try:
        for owner, name in watched:
            setattr(owner, name, init if name == "__init__" else stop)
        yield steps
    finally:
        for (owner, name), method in before.items():
            setattr(owner, name, method)


def explained(step: TrainStep) -> Explanation:
    """All that is known of a compiled step, as plain values. Costs are modelled, not timed."""
    made = step.report
    program = made.programs[0] if made.programs else None
    return {
        "device": made.device,
        "precision": made.precision,
        "parameters": made.parameters,
        "seconds": {name: round(seconds, 4) for name, seconds in made.seconds.items()},
        "nodes": dict(made.nodes),
        "recognised": [{"text": str(r)} | _plain(r) for r in made.recognised],
        "rules": dict(made.rules.most_common()),
        "rewritten": [_plain(r) for r in made.rewritten],
        "flops": made.flops,
        "bytes_moved": made.bytes,
        "forecast": made.peak_bytes,
        "kernels": _kernels(step),
        "memory": _memory(step),
        "from_cache": program is not None and program.from_cache,
    }


def _plain(record: Recognised | Rewritten) -> Explanation:
    """A record's fields as numbers and text."""
    return {f.name: _as_plain(getattr(record, f.name)) for f in fields(record)}


def _as_plain(value: object) -> int | float | str:
    value = value.value if isinstance(value, Enum) else value
    return value if isinstance(value, (int, float, str)) else str(value or "")


def _kernels(step: TrainStep) -> list[Explanation]:
    """By what they cost in the target's model of operations and bytes."""
    how = step.report.precision != "float32", backend(step.report.device).target.costs
    costs = [k.calls * picoseconds(k.facts.flops, k.facts.nbytes, *how) for k in step.kernels]
    rows = [
        {
            "kernel": k.name,
            "share": cost / sum(costs),
            "calls": k.calls,
            "flops": k.calls * k.facts.flops,
            "bytes": k.calls * k.facts.nbytes,
            "lines": list(k.lines),
        }
        for k, cost in zip(step.kernels, costs, strict=True)
    ]
    return sorted(rows, key=lambda row: -row["share"])


def _memory(step: TrainStep) -> Explanation | None:
    """Bytes by phase, what lives at the peak, and what a budget lets run again."""
    view = step.memory
    if view is None:
        return None
    again: dict[tuple[str, str], Explanation] = {}
    for r in view.again:
        row = again.setdefault(
            (r.kernel, " ".join(r.lines)),
            {"kernel": r.kernel, "lines": list(r.lines), "calls": 0, "saved": 0, "flops": 0},
        )
        row["calls"] += 1
        row["saved"] += r.saved
        row["flops"] += r.flops
    return {
        "arena": view.arena,
        "live": view.live,
        "held": view.held,
        "uncut": view.uncut or view.arena,
        "by_phase": list(view.alive),
        "at_peak": [
            {"bytes": b.nbytes, "kernel": b.kernel, "lines": list(b.lines)} for b in view.buffers
        ],
        "recomputed": sorted(again.values(), key=lambda row: -row["saved"]),
    }


def shown(found: Explanation) -> str:
    """An explanation to read."""
    head = f"step on {found['device']}, {found['precision']}, {found['parameters']:,} parameters"
    stages = ", ".join(f"{n} {s:.2f}" for n, s in found["seconds"].items() if s >= 0.005)
    lines = [head, f"compiled in {sum(found['seconds'].values()):.2f} s: {stages or 'no time'}"]
    lines += ["", *_shown_rules(found), "", *_shown_kernels(found)]
    return "\n".join([*lines, "", *_shown_memory(found)])


def _shown_rules(found: Explanation) -> list[str]:
    lines = ["recognised: " + ("" if found["recognised"] else "nothing that was written out")]
    for text, times in Counter(r["text"] for r in found["recognised"]).items():
        lines.append(f"  {text}" + (f", {times} times" if times > 1 else ""))
    count = sum(found["rules"].values())
    lines.append(f"rules applied: {len(found['rules'])}, {count:,} times")
    costs = {r["rule"]: r for r in found["rewritten"]}
    for name, times in [*found["rules"].items()][:ROWS]:
        lines.append(f"  {name:<40}{times:>8}{_costs(costs.pop(name, None))}")
    for name, r in costs.items():
        lines.append(f"  {name:<40}{r['count']:>8}{_costs(r)}")
    return lines


def _costs(row: Mapping[str, Any] | None) -> str:
    return "" if row is None else f"  cost {row['before']:.4g} to {row['after']:.4g}"


def _shown_kernels(found: Explanation) -> list[str]:
    total = f"{found['flops'] / 1e9:,.2f} GFLOP, {found['bytes_moved'] / 1e6:,.1f} MB moved"
    lines = [f"kernels: {len(found['kernels'])}, {total}; by modelled cost:"]
    for k in found["kernels"][:ROWS]:
        numbers = f"{k['share']:>7.1%}{k['calls']:>6} calls {k['flops'] / 1e9:>9.3f} GFLOP"
        lines.append(f"{numbers}{k['bytes'] / 1e6:>10.2f} MB  {_named(k)}")
    return lines


def _named(row: Mapping[str, Any]) -> str:
    return f"{row['kernel']} {' '.join(row['lines'][:1])}".rstrip()


def _shown_memory(found: Explanation) -> list[str]:
    memory = found["memory"]
    if memory is None:
        return ["memory: the oracle has no plan"]
    lines = [
        f"memory: forecast {found['forecast'] / 1e6:,.1f} MB; arena {memory['arena'] / 1e6:,.1f} "
        f"MB, at most {memory['live'] / 1e6:,.1f} MB of it alive; alive by phase:"
    ]
    phases, most = memory["by_phase"], max(1, memory["live"])
    wide = -(-len(phases) // ROWS) or 1
    for start in range(0, len(phases), wide):
        largest = max(phases[start : start + wide])
        last = min(start + wide, len(phases)) - 1
        bar = "#" * round(BAR * largest / most)
        lines.append(f"  {start:>4} to {last:<4}{largest / 1e6:>10.2f} MB  {bar}")
    if memory["recomputed"]:
        saved = memory["uncut"] - memory["arena"]
        flops = sum(r["flops"] for r in memory["recomputed"])
        lines.append(
            f"recomputed for the budget: {saved / 1e6:,.1f} MB less than the "
            f"{memory['uncut'] / 1e6:,.1f} MB without, for {flops / 1e9:,.2f} GFLOP more; of what "
            "waited, the most bytes for each operation:"
        )
        for r in memory["recomputed"][:ROWS]:
            numbers = f"{r['calls']:>6} calls {r['flops'] / 1e9:>9.3f} GFLOP"
            lines.append(f"{numbers}{r['saved'] / 1e6:>10.2f} MB not kept  {_named(r)}")
    return lines
