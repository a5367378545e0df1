"""Two ranks of one thread against one rank of two threads: a step's time, and where it goes.

    python bench/distributed.py                       # GPT 6 × 384, context 256, batch 4
    python bench/distributed.py gpt_nano --rounds 20
    mpiexec -n 2 python bench/distributed.py --rank   # what it launches

Both train the same step, cut into as many shards; the bits are compared. Runs take turns, and the
least time of all counts. Figures go to bench/results/distributed.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "distributed.json"


def measured(name: str, shards: int, rounds: int, plain: bool, overlap: bool) -> dict[str, Any]:
    """One configuration, in this process and those it was launched with."""
    import treadle as td
    from models import WORKLOADS, loss
    from treadle import optim
    from treadle.distributed.launched import open_communicator

    work, comm = WORKLOADS[name], open_communicator("auto", 600.0)
    parallel = None if plain else td.DataParallel(shards=shards, timeout=600.0, overlap=overlap)
    step = td.compile_step(
        work.make(), loss, optim.adamw(1e-4), work.specs(), clip_norm=work.clip, device="cpu",
        parallel=parallel,
    )  # fmt: skip
    losses = [float(step(work.batch(i)).loss) for i in range(2)]
    rows: list[dict[str, float]] = []
    for _ in range(rounds):
        comm.texts("")  # all ranks begin together
        before = dict(step.report.exchange)
        start, used = time.perf_counter(), time.process_time()
        float(step(work.batch(0)).loss)
        row = {"step": time.perf_counter() - start, "processor": time.process_time() - used}
        spent = {k: v - before.get(k, 0) for k, v in step.report.exchange.items()}
        # A rank that is ahead waits for what the other one sends first, whichever that is.
        names = ("numbers", "exchange of gradients", "exchange of parameters")
        rows.append(row | spent | {"waiting": sum(spent.get(n, 0.0) for n in names)})
    params = step.params
    digest = hashlib.sha256(b"".join(params[n].tobytes() for n in sorted(params))).hexdigest()
    held = sum(t.nbytes for n, t in step.session.types.items() if ":optimizer:" in n)
    # Each part by itself: other programs on the machine disturb now one and now another.
    best = {k: min(r[k] for r in rows) for k in rows[0]}
    return {"rank": comm.rank, "losses": losses, "digest": digest, "held": held, "best": best}


def launched(ranks: int, threads: int, arguments: list[str]) -> dict[str, Any]:
    mpiexec = Path(sys.executable).parent / "mpiexec"
    command = [sys.executable, str(Path(__file__).resolve()), "--rank", *arguments]
    if ranks > 1:
        command = [str(mpiexec), "-n", str(ranks), *command]
    environment = {**os.environ, "TREADLE_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(next(t for t in done.stdout.splitlines() if t.startswith("{")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="?", default="gpt_char")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help="be one rank")
    parser.add_argument("--apart", action="store_true", help="exchange after the backward")
    parser.add_argument("--plain", action="store_true", help="without shards")
    given = parser.parse_args()
    if given.rank:
        found = measured(given.workload, given.shards, given.rounds, given.plain, not given.apart)
        if found["rank"] == 0:
            print(json.dumps(found))
        return
    arguments = [given.workload, "--shards", str(given.shards), "--rounds", str(given.rounds)]
    kinds = {
        "one rank, two threads, no shards": (1, 2, [*arguments, "--plain"]),
        "one rank, two threads": (1, 2, arguments),
        "two ranks, exchange after": (2, 1, [*arguments, "--apart"]),
        "two ranks, one thread each": (2, 1, arguments),
    }
    best: dict[str, Any] = {}
    for _ in range(given.turns):
        for kind, (ranks, threads, given_arguments) in kinds.items():
            found = launched(ranks, threads, given_arguments)
            known = best.setdefault(kind, found)["best"]
            best[kind]["best"] = {k: min(v, known[k]) for k, v in found["best"].items()}
    one, two = best["one rank, two threads"], best["two ranks, one thread each"]
    for kind, found in best.items():
        parts = ", ".join(f"{k} {1e3 * v:.1f}" for k, v in found["best"].items() if k != "step")
        print(f"{kind:<34}{1e3 * found['best']['step']:>9.1f} ms   ({parts})")
    print(f"same bits: {one['digest'] == two['digest'] and one['losses'] == two['losses']}")
    print(
        f"two ranks / one: {two['best']['step'] / one['best']['step']:.3f} by the clock, "
        f"{2 * two['best']['processor'] / one['best']['processor']:.3f} by processor time"
    )
    after = best["two ranks, exchange after"]["best"]
    waited, alone = two["best"]["waiting"], after["waiting"]
    print(f"waiting for the other rank: {1e3 * alone:.1f} ms with nothing beside an exchange, "
          f"{1e3 * waited:.1f} ms otherwise: {1 - waited / alone:.0%} hidden")  # fmt: skip
    print(f"optimizer's state on a rank: {two['held'] / one['held']:.3f} of the whole")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"workload": given.workload, **best}, indent=1) + "\n")


if __name__ == "__main__":
    main()
