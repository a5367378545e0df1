"""Data-parallel steps on one GPU: what the path by NCCL costs, and the bits of two ranks.

    python bench/distributed_gpu.py                 # all parts, a process and a time limit each
    python bench/distributed_gpu.py cost bits_gpt   # some of them
    python bench/distributed_gpu.py brief           # the bounds alone, in at most 90 seconds
    python bench/distributed_gpu.py --part cost     # one, in this process: what it starts

`calls` captures exchanges of NCCL with itself in a graph. `cost` compares, in turns, GPT 6 × 384 in
bfloat16 without `parallel` and with one shard on one rank: by NCCL, through the host's memory, and
exchanging nothing. All are compiled with deterministic=True, as data-parallel steps on a GPU are;
the step without that is there to compare with. `where` says what the programs of these steps take.
`bits_…` train 20 steps with one rank (each transport) and with two or four ranks that share the
GPU, through the host's memory, and compare parameters, the optimizer's state and everything that
steps have told; each run compiles anew. `brief` is what of that has a bound: three steps of `cost`,
the bits of one and two ranks. Ranks are started with the `mpiexec` that is found. Figures go to
bench/results/distributed_gpu.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "distributed_gpu.json"
LIMITS = {
    "brief": 90,
    "calls": 60,
    "cost": 240,
    "where": 120,
    "bits_mlp": 240,
    "bits_cnn": 240,
    "bits_gpt": 240,
}  # seconds
RUN = 90  # seconds for one number of ranks
STEPS, TURN, ROUNDS = 20, 0.5, 8


def calls() -> dict[str, Any]:
    """Grouped sends and receives, and a gather, in a graph that is launched twice."""
    from treadle.runtime.cuda import nccl
    from treadle.runtime.cuda.captures import captured
    from treadle.runtime.cuda.device import Block, checked, device

    here = device()
    start = time.perf_counter()
    comm = nccl.NcclCommunicator(nccl.new_id(), 0, 1)
    made = time.perf_counter() - start
    given, swapped, gathered = (Block(1 << 22) for _ in range(3))

    def enqueue(stream: Any) -> None:
        with comm.group():
            comm.all_to_all(given.address, swapped.address, given.nbytes, stream)
            comm.all_gather(given.address, gathered.address, given.nbytes, stream)

    graph = captured(enqueue)
    rng, same = np.random.default_rng(0), []
    for _ in range(2):
        array = rng.integers(0, 256, given.nbytes).astype(np.uint8)
        given.write(array)
        checked(here.driver.cuGraphLaunch(graph, here.stream), "calls")
        same += [bool((b.read(np.empty_like(array)) == array).all()) for b in (swapped, gathered)]
    return {
        "nccl": nccl.shown_version(), "device": here.name, "place": here.place,
        "seconds to connect": made, "same": all(same),
    }  # fmt: skip


WAYS = {  # a transport, or no `parallel`; whether algorithms are not timed
    "without parallel": (None, True),
    "NCCL": ("nccl", True),
    "one process": ("self", True),
    "host": ("host", True),
    "without parallel, timed algorithms": (None, False),
}
BRIEF = ("without parallel", "NCCL", "one process")


def cost(ways: Sequence[str] = tuple(WAYS), waits: bool = False) -> dict[str, Any]:
    """Milliseconds of a step of GPT 6 × 384, by way of exchanging.

    Ways take turns. A ratio is the median over turns of a turn to the same turn of the first way,
    so that clocks that change with time do not count; with it go the least turns. With `waits` it
    begins when there is a line to read.
    """
    import treadle as td
    from models import WORKLOADS, loss
    from treadle import optim

    work = WORKLOADS["gpt_6x384"]

    def compiled(transport: str | None, deterministic: bool = True) -> td.TrainStep:
        parallel = None if transport is None else td.DataParallel(shards=1, transport=transport)
        return td.compile_step(
            work.make(), loss, optim.adamw(1e-4), work.specs(), clip_norm=work.clip,
            device="cuda", precision="bfloat16", parallel=parallel,
            options=td.CompileOptions(deterministic=deterministic),
        )  # fmt: skip

    start = time.perf_counter()
    steps = {name: compiled(*WAYS[name]) for name in ways}
    compiling = time.perf_counter() - start
    if waits:
        sys.stdin.readline()
    batch = work.batch(0)
    first = {name: [float(step(batch).loss) for _ in range(5)] for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(1e3 * _turn(step, batch))
    return {
        "ms": {name: statistics.median(t) for name, t in times.items()},
        "least": {name: min(t) for name, t in times.items()},
        "ratio": {n: _ratio(t, times["without parallel"]) for n, t in times.items()},
        "NCCL to one process": _ratio(times["NCCL"], times["one process"]),
        "turns": times, "losses": first, "compiling": compiling,
        "reports": {n: s.report.transport for n, s in steps.items()},
    }  # fmt: skip


def _ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """The median over turns."""
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


def where() -> dict[str, Any]:
    """Where the time of those steps goes: each program by itself, and its longest kernels."""
    import treadle as td
    from models import WORKLOADS, loss
    from treadle import optim
    from treadle.backends.compiled import compiled_part
    from treadle.runtime.chain import Run

    work, found = WORKLOADS["gpt_6x384"], {}
    for label, parallel in (("without", None), ("one shard", td.DataParallel(shards=1))):
        step = td.compile_step(
            work.make(), loss, optim.adamw(1e-4), work.specs(), clip_norm=work.clip,
            device="cuda", precision="bfloat16", parallel=parallel,
            options=td.CompileOptions(deterministic=True),
        )  # fmt: skip
        (program,) = step._programs.built(step._inputs)._built.values()
        links = [program] if parallel is None else [
            k.program for k in program.chain.links if isinstance(k, Run)
        ]  # fmt: skip
        for link in links:
            part = compiled_part(link)
            rng = np.random.default_rng(0)
            values = {
                n: (rng.random(t.shape) * 0.02 + 0.001).astype(t.dtype.numpy)
                for n, _, t in part.plan.leaves
            }
            rows = sorted(part.profile(values), key=lambda r: -r.seconds)
            names = [k.name for k in part.plan.kernels]
            found[f"{label}: {link.graph.name}"] = {
                "ms": 1e3 * part.seconds(values, 0.3),
                "launches": len(rows),
                "kernels": [
                    [names[r.calls[0][0]] if not r.name else r.name, sum(c for _, c in r.calls),
                     1e3 * r.seconds] for r in rows[:40]
                ],
            }  # fmt: skip
    return found


def _turn(step: Any, batch: Any) -> float:
    """Seconds of a step, over about some seconds; the device is done at the end."""
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < TURN:
        for _ in range(8):
            out = step(batch)
        float(out.loss)
        count += 8
    return (time.perf_counter() - start) / count


# The same bits


def _mlp() -> tuple[Any, Any, dict[str, Any], Callable[[Any], dict[str, np.ndarray]]]:
    import treadle as td
    from treadle import losses, nn

    model = nn.Sequential(nn.Linear(784, 511), nn.GELU(), nn.Dropout(0.1), nn.Linear(511, 10))

    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch["x"])
        td.metric("right", (logits.argmax(-1) == batch["y"]).astype(td.float32).mean())
        return losses.cross_entropy(logits, batch["y"])

    def batch(rng: Any) -> dict[str, np.ndarray]:
        x = rng.standard_normal((256, 784)).astype(np.float32)
        return {"x": x, "y": rng.integers(0, 10, 256).astype(np.int32)}

    return model, loss, {"clip_norm": 1.0}, batch


def _cnn() -> tuple[Any, Any, dict[str, Any], Callable[[Any], dict[str, np.ndarray]]]:
    from treadle import losses, nn

    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4096, 10),
    )  # fmt: skip

    def loss(model: Any, batch: Any) -> Any:
        return losses.cross_entropy(model(batch["x"]), batch["y"])

    def batch(rng: Any) -> dict[str, np.ndarray]:
        x = rng.standard_normal((64, 3, 32, 32)).astype(np.float32)
        return {"x": x, "y": rng.integers(0, 10, 64).astype(np.int32)}

    return model, loss, {}, batch


def _gpt() -> tuple[Any, Any, dict[str, Any], Callable[[Any], dict[str, np.ndarray]]]:
    from models import GPT, loss

    def batch(rng: Any) -> dict[str, np.ndarray]:
        tokens = rng.integers(0, 251, (2, 16, 64)).astype(np.int32)
        return {"x": tokens[0], "y": tokens[1]}

    given = {"accumulate": 2, "clip_norm": 0.5, "precision": "bfloat16"}
    return GPT(251, 64, 128, 4, 4), loss, given, batch


MODELS = {"mlp": _mlp, "cnn": _cnn, "gpt": _gpt}


def trained(name: str, transport: str) -> dict[str, Any]:
    """What this rank has when all steps are made; whole arrays, whoever holds them."""
    import treadle as td
    from treadle import optim

    model, loss, given, batch = MODELS[name]()
    rng = np.random.default_rng(7)
    batches = [batch(rng) for _ in range(STEPS)]
    start = time.perf_counter()
    step = td.compile_step(
        model, loss, optim.adamw(1e-3), batches[0], device="cuda",
        parallel=td.DataParallel(shards=4, transport=transport, timeout=100.0), **given,
    )  # fmt: skip
    compiling = time.perf_counter() - start
    told, times = [], []
    for b in batches:
        start = time.perf_counter()
        out = step(b)
        told.append([float(out.loss), out.grad_norm, out.metrics, out.updated])
        times.append(time.perf_counter() - start)
    state = step.state_dict()
    whole = hashlib.sha256(repr(told).encode())
    arrays = {}
    for key in sorted(state):
        array = np.ascontiguousarray(state[key])
        whole.update(key.encode() + array.tobytes())
        arrays[key] = hashlib.sha256(array.tobytes()).hexdigest()[:12]
    return {
        "rank": td.distributed.rank(), "digest": whole.hexdigest(),
        "arrays": arrays, "first": told[0], "last": told[-1], "compiling": compiling,
        "ms": 1e3 * statistics.median(times), "report": step.report.transport,
        "exchange": step.report.exchange,
    }  # fmt: skip


def bits(name: str) -> dict[str, Any]:
    """Every way that there is on one GPU, each in processes of its own."""
    runs = {"1, alone": (1, "auto"), "2, host": (2, "auto"), "1, NCCL": (1, "nccl")}
    if name == "mlp":
        runs |= {"1, host": (1, "host"), "4, host": (4, "host")}
    found = {label: ranks_of(name, *run) for label, run in runs.items()}
    first = found["1, alone"]
    for row in found.values():
        if "digest" in row and "digest" in first:
            row["same bits"] = row["digest"] == first["digest"] and row["ranks agree"]
            keys = first["arrays"]
            row["differ"] = [k for k in keys if row["arrays"].get(k) != keys[k]]
    for row in found.values():
        row.pop("arrays", None)
    return found


def brief() -> dict[str, Any]:
    """What has a bound. Bits are compared while steps are compiled, which are timed alone then."""
    pipe = subprocess.PIPE
    command = [sys.executable, __file__, "--part", "cost_brief"]
    timing = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    runs = {f"{n}, {ranks}": (n, ranks, "auto") for n in ("mlp", "gpt") for ranks in (1, 2)}
    with ThreadPoolExecutor(len(runs)) as pool:
        rows = dict(zip(runs, pool.map(lambda run: ranks_of(*run), runs.values()), strict=True))
    for label, row in rows.items():
        first = rows[f"{runs[label][0]}, 1"]
        told = row.get("digest"), first.get("digest")
        row["same bits"] = None not in told and told[0] == told[1] and row["ranks agree"]
        row["differ"] = [k for k, a in first.get("arrays", {}).items()
                         if row.get("arrays", {}).get(k) != a]  # fmt: skip
    for row in rows.values():
        row.pop("arrays", None)
    told, errors = timing.communicate("go\n")
    lines = [t for t in told.splitlines() if t.startswith("{")]
    timed = json.loads(lines[-1]) if lines else {"error": errors[-2500:]}
    return {"cost": timed, "bits": rows}


def ranks_of(name: str, ranks: int, transport: str) -> dict[str, Any]:
    """A model on some ranks that compile all they need; an error is a result, too."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rank", name, transport, folder]
        if ranks > 1:
            command = [mpiexec(), "-n", str(ranks), *command]
        environment = {**os.environ, "TREADLE_CACHE": f"{folder}/cache"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=RUN, env=environment
            )
        except subprocess.TimeoutExpired as error:
            return {"error": f"{RUN} s have passed: {_text(error.stderr)[-1500:]}"}
        parts = [json.loads(p.read_text()) for p in sorted(Path(folder).glob("rank*.json"))]
    if done.returncode or len(parts) != ranks:
        return {"error": f"code {done.returncode}: {(done.stdout + done.stderr)[-2500:]}"}
    return parts[0] | {"ranks agree": len({p["digest"] for p in parts}) == 1}


def _text(text: Any) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text or ""


def mpiexec() -> str:
    beside = Path(sys.executable).parent / "mpiexec"
    found = shutil.which("mpiexec") or (str(beside) if beside.exists() else None)
    if found is None:
        raise SystemExit("there is no mpiexec: pip install 'treadle[distributed]'")
    return found


def shown(part: str, found: dict[str, Any]) -> Iterator[str]:
    if "error" in found:
        yield f"{part}: {found['error']}"
    elif part == "calls":
        yield f"NCCL {found['nccl']} on {found['device']}: in a graph, the same {found['same']}"
    elif part == "cost":
        for name, ms in found["ms"].items():
            least = found["least"][name]
            yield f"cost {name:<36}{ms:>9.3f} ms, least {least:.3f}{found['ratio'][name]:>9.4f}"
        yield f"NCCL to one shard without: {found['NCCL to one process']:.4f}"
        yield from (f"cost {n}: {r}" for n, r in found["reports"].items() if r)
    elif part == "brief":
        yield from shown("cost", found["cost"])
        yield from shown("bits", found["bits"])
    elif part == "where":
        for name, row in found.items():
            longest = ", ".join(f"{k} ×{c} {ms:.3f}" for k, c, ms in row["kernels"][:12])
            yield f"{name:<24}{row['ms']:>8.3f} ms, {row['launches']} launches: {longest}"
    else:
        for label, row in found.items():
            told = row.get("error") or (
                f"same bits: {row.get('same bits')}, {row['ms']:.2f} ms a step, compiled in "
                f"{row['compiling']:.1f} s; {row['report']}; differ: {row.get('differ', [])[:6]}"
            )
            yield f"{part} {label:<10} {told}"


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "brief": brief,
    "calls": calls,
    "cost": cost,
    "cost_brief": lambda: cost(BRIEF, waits=True),
    "where": where,
    **{f"bits_{n}": (lambda n=n: bits(n)) for n in MODELS},
}


def started(part: str) -> dict[str, Any]:
    """A part in a process of its own; an error is a result, too."""
    command = [sys.executable, __file__, "--part", part]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMITS[part])
    except subprocess.TimeoutExpired as error:
        return {"error": f"{LIMITS[part]} s have passed: {_text(error.stderr)[-2500:]}"}
    lines = [t for t in done.stdout.splitlines() if t.startswith("{")]
    if done.returncode or not lines:
        return {"error": f"code {done.returncode}: {done.stderr[-4000:]}"}
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[p for p in PARTS if "brief" not in p])
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--rank", nargs=3, metavar=("MODEL", "TRANSPORT", "FOLDER"))
    given = parser.parse_args()
    if given.rank:
        found = trained(*given.rank[:2])
        Path(given.rank[2], f"rank{found['rank']}.json").write_text(json.dumps(found))
        return
    if given.part:
        print(json.dumps(PARTS[given.part]()), flush=True)
        return
    target = Path(os.environ.get("OUT") or RESULTS.parent) / RESULTS.name
    found: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    for part in given.parts:
        start = time.perf_counter()
        found[part] = started(part)
        for line in shown(part, found[part]):
            print(line, flush=True)
        print(f"  {part}: {time.perf_counter() - start:.0f} s", flush=True)
        target.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
