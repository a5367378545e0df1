"""How to compile, and what was compiled: `CompileOptions` and `CompileReport`."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from treadle.base.errors import ArgumentError
from treadle.base.memory import bytes_in
from treadle.base.numbers import POSITIVE, check_choice, check_number, check_whole
from treadle.base.rewrites import Recognised, Rewritten
from treadle.kernel.claims import Claim
from treadle.kernel.evidence import Evidence
from treadle.kernel.machine import NATIVE, target_name
from treadle.kernel.plan import KernelFacts


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How to compile.

    `on_new_shape="specialise"` compiles for batches of other shapes, at most `max_shapes` of them.
    `verify="fast"` checks types and invariants of every graph, and of every kernel bounds, races,
    phases and memory. `"full"` also compares each kernel with its part of the graph, and all
    stages without a bound on the work, over a finite field: what is wrong is an error that names
    it, and nothing runs. `"off"` checks no graphs. `detect_anomaly=True` looks at what
    a step gives: at a NaN or an infinity the step is undone, and the node that made it is named.
    `optimize=False` keeps every tensor in memory, one kernel each, to look at. `rewrite=False`
    leaves out rules that put a cheaper equal graph in place of the one that was written and
    differentiated. `recompute=False` keeps on a GPU what the backward pass would compute anew to
    save memory. `memory_budget` is the most that a training step may take, as `peak_bytes` of its
    report says, in bytes or as text ("2GiB"), or the fraction that is left of its arena, of what is
    temporary; kernels run a second time for it. `deterministic=True`
    gives the same bits in every run on a GPU too, where scatters and the fastest gradients of
    attention and convolutions may not; a CPU always does. `check_indices` looks at integers of
    the batch that are used as indices, before anything runs: one that is out of range is an
    error. `debug=True` makes it one for indices that are computed, too, which are held inside
    their axis otherwise.
    `search="measured"` times whole programs with other sizes of blocks, other fusion and other
    choices between storing and recomputing, for at most `seconds` a program; the fastest is kept on
    disk for this graph on this machine. `numerics="strict"` computes what is written and nothing
    that is only equal over the reals: attention, norms, losses or convolutions that are written out
    are not recognised as the functions that they are, and GPUs round products before adding them.
    """

    on_new_shape: str = "error"
    max_shapes: int = 8
    verify: str | bool = "fast"
    detect_anomaly: bool = False
    optimize: bool = True
    rewrite: bool = True
    debug: bool = False
    deterministic: bool = False
    recompute: bool = True
    memory_budget: int | float | str | None = None
    target: str | int = NATIVE
    check_indices: bool = True
    search: str = "off"
    seconds: float = 30.0
    numerics: str = "equal"

    def __post_init__(self) -> None:
        if self.on_new_shape not in ("error", "specialise"):
            raise ArgumentError(
                "CompileOptions",
                f"on_new_shape is {self.on_new_shape!r}",
                'Use "error" or "specialise".',
            )
        if isinstance(self.verify, bool):  # as it was before there were several ways
            object.__setattr__(self, "verify", "fast" if self.verify else "off")
        check_choice("CompileOptions", "verify", self.verify, ("off", "fast", "full"))
        check_choice("CompileOptions", "search", self.search, ("off", "measured"))
        check_choice("CompileOptions", "numerics", self.numerics, ("equal", "strict"))
        check_number("CompileOptions", "seconds", self.seconds, POSITIVE)
        check_whole("CompileOptions", "max_shapes", self.max_shapes)
        # Frozen: what was given as text is the number that it says from here on.
        object.__setattr__(self, "memory_budget", as_budget(self.memory_budget))
        target_name(self.target)  # anything that is none is an error here

    @property
    def without_budget(self) -> CompileOptions:
        """For programs beside a training step, which have no backward pass to compute for."""
        return self if self.memory_budget is None else replace(self, memory_budget=None)


MOST_NAMES = 8  # of parameters, in a line of a report


def as_budget(given: object) -> int | float | None:
    """A memory budget: whole bytes of a step, or the fraction that is left of its arena."""
    if given is None:
        return None
    found = bytes_in(given) if isinstance(given, str) else given
    if isinstance(found, (int, np.integer)) and not isinstance(found, bool) and found > 0:
        return int(found)
    if isinstance(found, (float, np.floating)) and 0 < found <= 1:
        return float(found)
    raise ArgumentError(
        "CompileOptions",
        f"memory_budget is {given!r}",
        'Give bytes as a whole number or as text ("2GiB", "800MB"), or a fraction above 0 and at '
        "most 1.0 of what is temporary without a budget.",
    )


def as_options(options: object, otherwise: CompileOptions | None = None) -> CompileOptions:
    """The options given, or else others: the usual ones."""
    if options is None:
        return otherwise or CompileOptions()
    if not isinstance(options, CompileOptions):
        raise ArgumentError(
            "compile", f"options = {options!r}", "Pass td.CompileOptions(on_new_shape=…)."
        )
    return options


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """A native program in numbers. Bytes are those it holds beside the session's values."""

    name: str
    kernels: tuple[KernelFacts, ...]
    arena: int
    scratch: int
    outside: int  # constants and outputs
    from_cache: bool
    shares_arena: bool = False  # arena and scratch are memory of all programs, the largest counts
    again: tuple[KernelFacts, ...] = ()  # calls that a memory budget lets run a second time
    uncut: int = 0  # bytes of the arena without that budget; 0 where it has nothing to cut

    @property
    def calls(self) -> int:
        return sum(k.calls for k in self.kernels)

    @property
    def flops(self) -> int:
        return sum(k.calls * k.flops for k in self.kernels)

    @property
    def traffic(self) -> int:
        """Bytes that the kernels must at least move."""
        return sum(k.calls * k.nbytes for k in self.kernels)

    @property
    def nbytes(self) -> int:
        return self.arena + self.scratch + self.outside


def _cut_line(program: ProgramFacts) -> str:
    """What a budget cut, and what that costs."""
    calls = sum(k.calls for k in program.again)
    flops = sum(k.calls * k.flops for k in program.again)
    moved = sum(k.calls * k.nbytes for k in program.again)
    return (
        f"  {program.name}: arena {program.arena / 1e6:,.1f} MB within its budget, without "
        f"{program.uncut / 1e6:,.1f}; {calls} calls once more, {flops / 1e9:,.2f} GFLOP "
        f"({flops / max(1, program.flops - flops):.1%}) and {moved / 1e6:,.1f} MB moved"
    )


def _trained_lines(trained: tuple[str, ...], frozen: tuple[str, ...]) -> list[str]:
    """Which tensors of the model a step updates."""
    if not trained:
        return []
    count = len(trained) + len(frozen)
    if not frozen:
        return [f"trains all {count} parameter tensors"]
    return [f"trains {len(trained)} of {count} parameter tensors, not {_shortened(frozen)}"]


def _shortened(names: tuple[str, ...]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class KernelTime:
    """What a kernel took in one step, and how close that is to what is possible.

    `ceiling` is the larger of the shares of arithmetic and memory that it reached: of one core of
    the host on the CPU and the oracle, of a copy on the device on a GPU. `lines` are those of the
    model that it computes. On the oracle a row is an op, and operations are not counted.
    """

    kernel: KernelFacts
    seconds: float
    ceiling: float
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """What a measured search tried: a field of the target, and its time over the best before."""

    name: str
    value: object
    ratio: float
    is_taken: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """Kernels of a step by the time they take: processor time of one thread on the CPU."""

    kernels: tuple[KernelTime, ...]

    @property
    def seconds(self) -> float:
        return sum(k.seconds for k in self.kernels)

    def __str__(self) -> str:
        heads = ("ms", "share", "calls", "GFLOP/s", "GB/s", "ceiling")
        lines = [f"{'kernel':<28}" + "".join(f"{h:>9}" for h in heads)]
        for k in self.kernels:
            flops, nbytes = k.kernel.calls * k.kernel.flops, k.kernel.calls * k.kernel.nbytes
            time_ = max(k.seconds, 1e-12)
            lines.append(
                f"{k.kernel.name:<28}{k.seconds * 1e3:>9.3f}{k.seconds / self.seconds:>9.1%}"
                f"{k.kernel.calls:>9}{flops / time_ / 1e9:>9.1f}{nbytes / time_ / 1e9:>9.1f}"
                f"{k.ceiling:>9.0%}"
            )
        lines.append(f"{'all':<28}{self.seconds * 1e3:>9.3f}")
        return "\n".join(lines)


@dataclass(slots=True)
class CompileReport:
    """What was built and how long it took. It grows when more programs are built."""

    device: str
    precision: str
    parameters: int = 0
    compiles: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()  # parameters that a training step updates, by name
    frozen: tuple[str, ...] = ()  # and those that it leaves as they are
    programs: list[ProgramFacts] = field(default_factory=list)
    state_bytes: int = 0  # of the session: parameters, optimizer, counters
    target: str = ""  # the processor that programs are compiled for, where that is a choice
    rules: Counter[str] = field(default_factory=Counter)  # of graphs, by name: how often applied
    recognised: list[Recognised] = field(default_factory=list)  # composites that were written out
    rewritten: list[Rewritten] = field(default_factory=list)  # by an optimiser that counts costs
    trials: list[Trial] = field(default_factory=list)  # of a measured search, if there was one
    chosen: tuple[tuple[str, object], ...] = ()  # by the last search, or one of before
    claims: list[Claim] = field(default_factory=list)  # with verify="full"
    evidence: Evidence = field(default_factory=Evidence, repr=False)  # what a certificate is of
    exchange: dict[str, float] = field(default_factory=dict)  # seconds of data-parallel steps
    refused: list[str] = field(default_factory=list)  # library calls that own kernels stand in for
    transport: str = ""  # of a data-parallel step: its ranks, and how they exchange

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start, collects = time.perf_counter(), gc.isenabled()
        try:
            # A compiler makes many objects and next to no cycles: looking for them costs a tenth.
            gc.disable()
            yield
        finally:
            if collects:
                gc.enable()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def add_exchange(self, what: str, seconds: float) -> None:
        """Time that a step of several ranks has taken for something."""
        self.exchange[what] = self.exchange.get(what, 0.0) + seconds

    @property
    def kernels(self) -> tuple[KernelFacts, ...]:
        """Distinct kernels of the first program, the step's."""
        return self.programs[0].kernels if self.programs else ()

    @property
    def flops(self) -> int:
        return self.programs[0].flops if self.programs else 0

    @property
    def bytes(self) -> int:
        return self.programs[0].traffic if self.programs else 0

    @property
    def peak_bytes(self) -> int:
        """A forecast of the memory that values and programs take."""
        shared = (p.arena + p.scratch for p in self.programs if p.shares_arena)
        own = sum(p.outside if p.shares_arena else p.nbytes for p in self.programs)
        return self.state_bytes + own + max(shared, default=0)

    @property
    def cache_hits(self) -> int:
        return sum(p.from_cache for p in self.programs)

    def __str__(self) -> str:
        lines = [
            f"device {self.device}, precision {self.precision}, {self.parameters:,} parameters, "
            f"{self.compiles} program{'' if self.compiles == 1 else 's'}"
            + (f", target {self.target}" if self.target else ""),
            *_trained_lines(self.trained, self.frozen),
            f"{'stage':<18}{'seconds':>9}{'nodes':>8}",
        ]
        for name, seconds in self.seconds.items():
            count = self.nodes.get(name)
            lines.append(f"{name:<18}{seconds:>9.4f}{'' if count is None else count:>8}".rstrip())
        if self.programs:
            heads = ("program", "calls", "kernels", "GFLOP", "MB moved", "MB held", "cached")
            lines.append(f"{heads[0]:<18}" + "".join(f"{h:>9}" for h in heads[1:]))
        for p in self.programs:
            numbers = (p.calls, len(p.kernels), p.flops / 1e9, p.traffic / 1e6, p.nbytes / 1e6)
            shown = "".join(f"{n:>9,}" if isinstance(n, int) else f"{n:>9.2f}" for n in numbers)
            lines.append(f"  {p.name:<16}{shown}{'yes' if p.from_cache else 'no':>9}")
        lines += [_cut_line(p) for p in self.programs if p.uncut]
        if self.trials or self.chosen:
            told = (
                ", ".join(f"{name} = {value}" for name, value in self.chosen) or "the usual sizes"
            )
            lines.append(f"search: {told} (of {len(self.trials)} tried)")
        if self.claims:
            held = sum(c.is_established for c in self.claims)
            lines.append(f"verified: {held} of {len(self.claims)} claims established")
            lines += [f"  {c}" for c in self.claims if not c.is_established]
        if self.state_bytes:
            lines.append(
                f"memory forecast {self.peak_bytes / 1e6:,.1f} MB: values "
                f"{self.state_bytes / 1e6:,.1f}, programs "
                f"{(self.peak_bytes - self.state_bytes) / 1e6:,.1f}"
            )
        lines += [f"not by a library: {r}" for r in self.refused]
        lines += [f"recognised: {r}" for r in dict.fromkeys(self.recognised)]
        if self.transport:
            lines.append(f"data parallel: {self.transport}")
        if self.unreached:
            lines.append(f"the loss does not reach: {', '.join(self.unreached)}")
        return "\n".join(lines)
