"""Two ranks of one thread against one rank of two threads: a step's time, and where it goes.

    python bench/distributed.py                       # GPT 6 × 384, context 256, batch 4
    python bench/distributed.py gpt_nano --turns 20

All jobs are started first and stay; then they take turns of a few steps while the others sleep, so
that whatever else the machine does meets all of them. All train the same step, cut into as many
shards; the bits are compared. A step's time is that of the slower rank. Given are the least of all
steps, and the median over turns of what two jobs took in the same turn.

*Exposed* is the time in which no rank does anything but exchange: of each exchange the shorter of
the two ranks' waits, as both wait from when the later one has come to it. Communication is what is
exposed where every exchange begins when all is computed (`overlap=False`), and *hidden* is what of
it is not exposed by default. What a rank waits beyond that is for the other one, which computes: it
is printed beside. Copies are work of the same processors either way, so that processor time is
compared too. Figures go to bench/results/distributed.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "distributed.json"
LOOK = 0.02  # seconds between looks for one's turn
LIMIT = 600.0  # seconds for a turn, or for compiling
PLAIN, ONE, AFTER, TWO, SHARDED = KINDS = (
    "one rank, two threads, no shards",
    "one rank, two threads",
    "two ranks, exchange after",
    "two ranks, one thread each",
    "two ranks, sharded parameters",
)
Row = dict[str, float]
CLOCKS = ("step", "processor")


# A rank of a job


def compiled(kind: str, name: str, shards: int) -> Any:
    import treadle as td
    from models import WORKLOADS, loss
    from treadle import optim

    work = WORKLOADS[name]
    parallel = td.DataParallel(
        shards=shards, timeout=LIMIT, overlap=kind != AFTER, shard_parameters=kind == SHARDED
    )
    return td.compile_step(
        work.make(), loss, optim.adamw(1e-4), work.specs(), clip_norm=work.clip, device="cpu",
        parallel=None if kind == PLAIN else parallel,
    )  # fmt: skip


def rank(kind: str, name: str, shards: int, folder: Path) -> None:
    """One rank of a job: it compiles, takes its turns, and tells what it has at the end."""
    from models import WORKLOADS
    from treadle.distributed.launched import open_communicator

    work, comm = WORKLOADS[name], open_communicator("auto", LIMIT)
    step = compiled(kind, name, shards)
    losses = [float(step(work.batch(i)).loss) for i in range(2)]
    _forget_peak()
    told: Any = "compiled"
    for turn in range(10**6):
        if comm.rank == 0:
            written(folder / f"{turn}.done", told)
        asked = awaited(folder / f"{turn}")
        if not asked["steps"]:
            break
        told = [_timed(step, work.batch(0), comm) for _ in range(asked["steps"])]
    resident, peak = _memory("VmRSS"), _memory("VmHWM")
    own = [step._ranks.held_name(n) for n in step.recipe.trained()]
    parameters = sum(step.session.values[n].nbytes for n in own)
    params = step.params
    digest = hashlib.sha256(b"".join(params[n].tobytes() for n in sorted(params))).hexdigest()
    held = sum(t.nbytes for n, t in step.session.types.items() if ":optimizer:" in n)
    if comm.rank == 0:
        found = {
            "losses": losses, "digest": digest, "held": held, "parameters": parameters,
            "resident": resident, "peak": peak, "fetched": _fetched(step),
        }  # fmt: skip
        written(folder / "end", found)


def _timed(step: Any, batch: Any, comm: Any) -> Row:
    """One step on all ranks, which begin together."""
    comm.texts("")
    before = dict(step.report.exchange)
    start, used = time.perf_counter(), time.process_time()
    float(step(batch).loss)
    own = {"step": time.perf_counter() - start, "processor": time.process_time() - used}
    own |= {
        k: v - before.get(k, 0) for k, v in step.report.exchange.items() if k.startswith("exchange")
    }
    every = [json.loads(text) for text in comm.texts(json.dumps(own))]
    waits = [n for n in own if n.startswith("exchange")]
    return {
        "step": max(r["step"] for r in every),
        "processor": sum(r["processor"] for r in every),
        "exposed": sum(min(r[n] for r in every) for n in waits),
        "waiting": max(sum(r[n] for n in waits) for r in every),
        **{n: min(r[n] for r in every) for n in waits},
    }


def _fetched(step: Any) -> dict[str, int]:
    """Bytes of sharded parameters: all, those that a step gathers, and where they are then."""
    (program,) = step._programs.built(step._inputs)._built.values()
    running = getattr(program, "running", None)
    if running is None:
        return {}
    sizes = {n: running.ranks * part.nbytes for n, part in running.chain.fetched.items()}
    fetching = running._fetching
    gathered = sum(sizes[f.buffer] for f in fetching.fetches)
    return {"whole": sum(sizes.values()), "gathered": gathered, "room": fetching.nbytes}


def _memory(what: str) -> int:
    """Bytes that this process has, or has had at most since `_forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


def _forget_peak() -> None:
    """Compiling takes more than a step does."""
    Path("/proc/self/clear_refs").write_text("5")


def written(path: Path, told: Any) -> None:
    aside = path.with_suffix(".aside")
    aside.write_text(json.dumps(told))
    aside.rename(path)


def awaited(path: Path, is_there: Callable[[], bool] = lambda: True) -> Any:
    """What a file says, when it is there."""
    end = time.monotonic() + LIMIT
    while not path.exists():
        if time.monotonic() > end or not is_there():
            raise SystemExit(f"{path} is waited for in vain")
        time.sleep(LOOK)
    return json.loads(path.read_text())


# All jobs


class Job:
    """A kind of step on one or two ranks, two threads in all."""

    def __init__(self, kind: str, folder: Path, arguments: Sequence[str]):
        self.folder, self.turns = folder, 0
        folder.mkdir()
        ranks = 1 if kind in (PLAIN, ONE) else 2
        command = [sys.executable, str(Path(__file__).resolve()), *arguments]
        command += ["--rank", kind, str(folder)]
        if ranks > 1:
            command = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks), *command]
        environment = {**os.environ, "TREADLE_THREADS": str(2 // ranks)}
        self.process = subprocess.Popen(command, env=environment)
        self._done()

    def _done(self) -> Any:
        path = self.folder / f"{self.turns}.done"
        return awaited(path, lambda: self.process.poll() is None)

    def turn(self, steps: int) -> list[Row]:
        written(self.folder / str(self.turns), {"steps": steps})
        self.turns += 1
        return self._done()

    def end(self) -> Any:
        written(self.folder / str(self.turns), {"steps": 0})
        found = awaited(self.folder / "end")
        self.process.wait(60)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="?", default="gpt_char")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--rank", nargs=2, metavar=("KIND", "FOLDER"), help="be one rank")
    given = parser.parse_args()
    if given.rank:
        rank(given.rank[0], given.workload, given.shards, Path(given.rank[1]))
        return
    arguments = [given.workload, "--shards", str(given.shards)]
    with tempfile.TemporaryDirectory() as folder:
        jobs = {k: Job(k, Path(folder, str(i)), arguments) for i, k in enumerate(KINDS)}
        turns: dict[str, list[list[Row]]] = {k: [] for k in jobs}
        load = [os.getloadavg()[0]]
        for _ in range(given.turns):
            for kind, job in jobs.items():
                turns[kind].append(job.turn(given.steps))
            load.append(os.getloadavg()[0])
        ends = {kind: job.end() for kind, job in jobs.items()}
    told(turns, ends)
    print(f"other load: the system's average was {min(load):.1f} to {max(load):.1f}")
    kept = {k: ends[k] | {"turns": turns[k]} for k in KINDS}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"workload": given.workload, "load": load, **kept}) + "\n")


def least(turns: Sequence[Sequence[Row]], what: str) -> float:
    return min(row[what] for turn in turns for row in turn)


def compared(some: Sequence[Sequence[Row]], others: Sequence[Sequence[Row]], what: str) -> float:
    """The median over turns of the least of one turn to that of the other's."""
    pairs = zip(some, others, strict=True)
    return statistics.median(least([a], what) / least([b], what) for a, b in pairs)


def told(turns: dict[str, list[list[Row]]], ends: dict[str, Any]) -> None:
    for kind, rows in turns.items():
        parts = ", ".join(
            f"{k} {1e3 * least(rows, k):.1f}" for k in rows[0][0] if k not in ("step", "waiting")
        )
        print(f"{kind:<34}{1e3 * least(rows, 'step'):>9.1f} ms   ({parts})")
    digests = {ends[kind]["digest"] for kind in (ONE, AFTER, TWO, SHARDED)}
    print(f"same bits: {len(digests) == 1 and ends[ONE]['losses'] == ends[TWO]['losses']}")
    for kind in (PLAIN, ONE):
        ratios = [f"{least(turns[TWO], w) / least(turns[kind], w):.3f}" for w in CLOCKS]
        pairs = [f"{compared(turns[TWO], turns[kind], w):.3f}" for w in CLOCKS]
        print(
            f"two ranks / {kind}: {ratios[0]} by the clock, {ratios[1]} by processor time; "
            f"by turns {pairs[0]} and {pairs[1]}"
        )
    communication, left = least(turns[AFTER], "exposed"), least(turns[TWO], "exposed")
    by_turns = compared(turns[TWO], turns[AFTER], "exposed")
    print(
        f"communication: {1e3 * communication:.1f} ms exposed where it comes after, "
        f"{1e3 * left:.1f} ms by default: {1 - left / communication:.0%} hidden, by turns "
        f"{1 - by_turns:.0%}; with waiting for who computes "
        f"{1e3 * least(turns[AFTER], 'waiting'):.1f} and {1e3 * least(turns[TWO], 'waiting'):.1f}"
    )
    one, two, sharded = (ends[kind] for kind in (ONE, TWO, SHARDED))
    print(f"optimizer's state on a rank: {two['held'] / one['held']:.3f} of the whole")
    resident, peak = ([f"{e[k] / 2**20:.0f}" for e in (sharded, two)] for k in ("resident", "peak"))
    print(
        f"sharded parameters: {sharded['parameters'] / one['parameters']:.3f} of the whole; "
        f"resident {resident[0]} MiB between steps and {peak[0]} in them at most, where whole ones "
        f"have {resident[1]} and {peak[1]}"
    )
    whole, gathered, room = (sharded["fetched"][k] / 2**20 for k in ("whole", "gathered", "room"))
    print(f"of {whole:.1f} MiB a step gathers {gathered:.1f}, into {room:.1f}")


if __name__ == "__main__":
    main()
