"""WebGPU beside PyTorch and the CUDA backend, in turns in one process, on a hot device.

    python bench/webgpu.py all --out webgpu.json
    python bench/webgpu.py steps mlp cnn smollm2 --precision float32 --peers eager compile
    python bench/webgpu.py steps smollm2 --precision float16 --matrices --peers compile --profile
    python bench/webgpu.py products --precision float16 --matrices
    bash bench/webgpu_gpu.sh OUT
    python bench/webgpu.py attention --sizes 256 64 8 --sizes 1024 64 2

`all` is everything that is said of an NVIDIA GPU, each part in a process of its own with a limit of
time. What a part measured is added to the file when it is done; a part that fails is told with its
last lines, noted, and left out. `--only` names parts, `--limit` gives all of them a time, as in
`--limit 60 --limits smollm2_float16=120`, and `--small` replaces models and sizes by small ones
without PyTorch, to try the script on an adapter that is a processor.

`steps` trains workloads of bench/models.py. PyTorch's float32 is its own (`highest`), or with
`--tf32` rounded to TF32 inside products; beside float16 PyTorch computes in bfloat16 by autocast.
With `--stored` attention by matrices is left out: scores are stored, as products and softmax.
`products` multiplies square and training matrices on both of Treadle's backends in turns, results
read back once at the end, and prints TFLOP/s; with `--matrices` WebGPU once more with cooperative
matrices, and steps with them alone. Methods are those of bench/gpu.py. `attention` has a causal
one and its gradients with stored scores and without, in turns: seconds, and of the processor, which
is what counts where it is the adapter. Sizes are positions, elements of a head, and heads.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu
import numpy as np
from peers import BETAS, DECAY, EPSILON, RATE

import treadle as td
from models import WORKLOADS, Workload, loss
from treadle import nn, optim
from treadle.schedule import templates

# What `all` runs: a name, and arguments.
PARTS: dict[str, list[str]] = {
    "products_float16": ["products", "--precision", "float16", "--matrices"],
    "smollm2_float16": [
        "steps", "smollm2", "--precision", "float16", "--matrices", "--peers", "compile",
        "--profile",
    ],
    "mlp": ["steps", "mlp", "--peers", "eager"],
    "cnn": ["steps", "cnn", "--peers", "eager"],
    "attention": ["attention"],
    "products_float32": ["products", "--precision", "float32"],
    "smollm2_float32": ["steps", "smollm2", "--peers", "compile"],
    "smollm2_float32_tf32": ["steps", "smollm2", "--peers", "compile", "--tf32"],
}  # fmt: skip
_SIZES = ["--sizes", "96", "64", "80", "--rounds", "2"]
SMALL: dict[str, list[str]] = {
    "mlp": ["steps", "mlp", "--peers", "--turn", "0.1"],
    "mlp_float16": ["steps", "mlp", "--precision", "float16", "--peers", "--turn", "0.1"],
    "products_float32": ["products", "--devices", "webgpu", "cpu", *_SIZES],
    "products_float16": [
        "products", "--precision", "float16", "--matrices", "--devices", "webgpu", *_SIZES,
    ],
    "attention": ["attention", "--sizes", "64", "16", "2", "--rounds", "2"],
    "no_such_device": ["products", "--devices", "nowhere", *_SIZES],
}  # fmt: skip
COUNT = 8  # products of one program
ATTENTION = [(256, 64, 8), (1024, 64, 2), (4096, 64, 9)]  # positions, elements, heads
PRODUCTS = [(1024, 1024, 1024), (4096, 4096, 4096), (8192, 576, 1536), (8192, 576, 49152)]


def matrices(wanted: bool) -> td.CompileOptions:
    return td.CompileOptions(target="native+cooperative-matrix" if wanted else "native")


def contender(
    work: Workload, values: dict[str, np.ndarray], given: argparse.Namespace
) -> tuple[gpu.Contender, td.TrainStep]:
    start = time.perf_counter()
    step = td.compile_step(
        work.make(), loss, optim.adamw(RATE, BETAS, EPSILON, DECAY), work.specs(),
        clip_norm=work.clip, device="webgpu", precision=given.precision,
        options=matrices(given.matrices),
    )  # fmt: skip
    step.load_params(values)
    batch, last = work.batch(), [None]

    def one() -> None:
        last[0] = step(batch)

    made = gpu.Contender("webgpu", one, lambda: float(last[0].loss))
    made.step()
    made.notes["loss"] = made.wait()
    made.first = time.perf_counter() - start
    made.notes["memory GiB"] = step.report.peak_bytes / 2**30
    made.notes["launches"] = sum(k.calls for k in step.kernels)
    return made, step


def compare(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """A workload on WebGPU and its peers in turns: medians, and the median of ratios by turn."""
    work, precision = WORKLOADS[name], given.precision
    values = gpu.first_values(work)
    gpu.WIDE = tuple(WORKLOADS) if precision == "float32" else ()
    own, step = contender(work, values, given)
    own.turn(0.3)
    alone = f"{own.turn(given.turn) * 1e3:.3f} ms before others are there"
    print(f"{name}: webgpu is compiled, {own.first:.1f} s, {alone}", flush=True)
    if given.profile:
        table = str(step.profile(work.batch()))
        if given.table:
            given.table.write_text(table)
        print("\n".join(table.splitlines()[: given.lines]), flush=True)
    found = [own, *(gpu.torch_contender(mode, name, work, values) for mode in given.peers)]
    gpu.agree(found)
    for c in found:
        c.turn(0.3)
    for _ in range(gpu.ROUNDS):
        for c in found:
            c.times.append(c.turn(given.turn))
    print(f"{work.title}, {precision}", flush=True)
    rows = {}
    for c in found:
        ratios = [own / other for own, other in zip(found[0].times, c.times, strict=True)]
        row = {"ms": statistics.median(c.times) * 1e3, "ratio": statistics.median(ratios)}
        rows[c.name] = row | {"first_s": c.first, **c.notes, "turns_ms": [t * 1e3 for t in c.times]}
        rest = ", ".join(f"{k} {v:.4g}" for k, v in c.notes.items())
        ratio = f"webgpu/this {row['ratio']:.2f}"
        print(f"  {c.name:<16}{row['ms']:9.3f} ms  {ratio}  first {c.first:.1f} s, {rest}")
    return {"title": work.title, "precision": precision, "rows": rows}


class Products(nn.Module):
    """x · wᵀ for several w, all of them parameters: nothing is copied to the device in between."""

    def __init__(self, m: int, k: int, n: int, count: int):
        self.x = nn.Linear(k, m, bias=False)
        self.w = nn.ModuleList(nn.Linear(k, n, bias=False) for _ in range(count))

    def forward(self, scale: Any, dtype: Any) -> Any:
        x = self.x.weight.astype(dtype)
        found = [(x @ w.weight.astype(dtype).T).astype(td.float32).max() for w in self.w]
        return sum(found[1:], found[0]) * scale


def product(device: str, sizes: tuple[int, int, int], precision: str) -> Callable[[], Any]:
    """Several products in one program; "webgpu-matrices" with cooperative ones."""
    dtype, name = getattr(td, precision), device.removesuffix("-matrices")
    forward = td.compile_forward(
        Products(*sizes, COUNT),
        lambda model, batch: model(batch["scale"], dtype),
        {"scale": td.Spec(())},
        device=name,
        options=matrices(device != name),
    )
    batch = {"scale": np.float32(1)}
    return lambda: forward(batch)


def rates(sizes: tuple[int, int, int], given: argparse.Namespace) -> dict[str, Any]:
    """TFLOP/s of each device, the best of turns; why not, where one does not run."""
    devices = [*given.devices, *(["webgpu-matrices"] if given.matrices else [])]
    runs, found = dict[str, Callable[[], Any]](), dict[str, Any]()
    for device in devices:
        try:
            runs[device] = product(device, sizes, given.precision)
            float(np.asarray(runs[device]()))
        except td.TreadleError as error:
            runs.pop(device, None)
            found[device] = f"{type(error).__name__}: {error}"
    times: dict[str, list[float]] = {device: [] for device in runs}
    for _ in range(given.rounds + 1):
        for device, run in runs.items():
            start = time.perf_counter()
            float(np.asarray(run()))
            times[device].append(time.perf_counter() - start)
    m, k, n = sizes
    found |= {d: 2 * m * n * k * COUNT / min(t[1:]) / 1e12 for d, t in times.items()}
    text = (f"{d} {r:.3f}" if isinstance(r, float) else f"{d}: {r}" for d, r in found.items())
    print(f"{sizes} {given.precision}: {', '.join(text)} TFLOP/s", flush=True)
    if not runs:
        raise SystemExit("no device multiplied anything")
    return {"sizes": sizes, "precision": given.precision, "tflops": found}


def attention(sizes: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Seconds of a causal attention with its gradients, scores stored and not, and their ratio."""
    from treadle.autodiff.backward import differentiate
    from treadle.backends.stages import build
    from treadle.backends.webgpu.backend import WebGpuToolchain
    from treadle.compile_report import CompileReport
    from treadle.ir.types import TensorType
    from treadle.runtime.webgpu.device import device

    length, depth, heads = sizes
    type_, rng = TensorType((1, heads, length, depth)), np.random.default_rng(0)

    def squares(q: Any, k: Any, v: Any) -> Any:
        return (td.attention(q, k, v, causal=True) ** 2).sum()

    graph = differentiate(td.trace(squares, type_, type_, type_), ["q", "k", "v"]).graph
    arrays = {n: rng.normal(size=type_.shape).astype(np.float32) for n in "qkv"}
    runs, times = {}, {}
    for name, score_bytes in (("stored", 1 << 62), ("streamed", 16)):
        toolchain = WebGpuToolchain(replace(device().limits, binding_bytes=score_bytes))
        built = build(toolchain, graph, CompileReport("webgpu", "float32"), td.CompileOptions())
        runs[name], times[name] = toolchain.load(graph, built), []
    for i in range(rounds + 1):
        for name, program in runs.items():
            start = time.perf_counter(), time.process_time()
            [np.asarray(x) for x in program.run(arrays)]
            if i:
                spent = time.perf_counter() - start[0], time.process_time() - start[1]
                times[name].append(spent)
    found = {n: [statistics.median(x) for x in zip(*t, strict=True)] for n, t in times.items()}
    pairs = zip(times["streamed"], times["stored"], strict=True)
    ratio = statistics.median(a[1] / b[1] for a, b in pairs)
    text = ", ".join(f"{n} {t:.3f} s, {p:.3f} s of the processor" for n, (t, p) in found.items())
    print(f"{sizes}: {text}; streamed/stored {ratio:.2f} of the processor", flush=True)
    return {"sizes": sizes, "seconds": found, "processor_ratio": ratio}


# Everything, each part in its own process


def told() -> dict[str, Any]:
    """What was measured, and on what."""
    from treadle.runtime.webgpu.device import device

    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "adapter": device().name,
        "limits": repr(device().limits),
        "treadle": td.__version__,
        "python": platform.python_version(),
    }


def measure_all(given: argparse.Namespace) -> int:
    """Parts one after the other; how many failed."""
    parts = SMALL if given.small else PARTS
    unknown = set(given.only or ()) - set(parts)
    if unknown:
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}: use {', '.join(parts)}")
    failed, limits = 0, {n: float(s) for n, s in (x.split("=") for x in given.limits)}
    for name, arguments in parts.items():
        if given.only and name not in given.only:
            continue
        print(f"\n{name}: {' '.join(arguments)}", flush=True)
        record = measured(arguments, limits.get(name, given.limit))
        failed += "error" in record
        if "error" in record:
            lines = "\n".join(record["last_lines"])
            print(f"{name} failed: {record['error']}\n{lines}", flush=True)
        noted({"part": name, "arguments": arguments, **record}, given.out)
    print(f"\n{failed} parts failed; results are in {given.out}", flush=True)
    return failed


def measured(arguments: list[str], limit: float) -> dict[str, Any]:
    """What a part says in a process of its own, or why it says nothing."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        record, lines = Path(folder) / "record.json", Path(folder) / "lines"
        command = [sys.executable, __file__, *arguments, "--record", str(record)]
        with lines.open("w+") as errors:
            try:
                code = subprocess.run(command, stderr=errors, timeout=limit, check=False).returncode
                cause = f"it ended with {code}"
            except subprocess.TimeoutExpired:
                code, cause = 1, f"it took longer than {limit:.0f} s"
        seconds = {"seconds": time.perf_counter() - start}
        if code == 0 and record.exists():
            return json.loads(record.read_text()) | seconds
        last = lines.read_text().strip().splitlines()[-60:]
        return {"error": cause, "last_lines": last} | seconds


def noted(record: dict[str, Any], path: Path) -> None:
    """A record behind those that the file has."""
    every = json.loads(path.read_text()) if path.exists() else []
    new = path.with_suffix(".new")
    new.write_text(json.dumps([*every, record], indent=1))
    new.replace(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["all", "steps", "products", "attention"])
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--precision", default="float32", choices=["float32", "float16"])
    parser.add_argument("--peers", nargs="*", default=["eager", "compile"])
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--table", type=Path, help="where `--profile` writes all of its lines")
    parser.add_argument("--lines", type=int, default=100, help="of a profile that are printed")
    parser.add_argument("--turn", type=float, default=gpu.TURN, help="seconds of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs=3, type=int, action="append")
    parser.add_argument("--devices", nargs="*", default=["webgpu", "cuda"])
    parser.add_argument("--matrices", action="store_true", help="cooperative ones too")
    parser.add_argument("--stored", action="store_true", help="attention stores its scores")
    parser.add_argument("--record", type=Path, help="where to write what was measured")
    parser.add_argument("--out", type=Path, default=Path("webgpu.json"), help="of `all`")
    parser.add_argument("--only", nargs="*", help="parts of `all`")
    parser.add_argument("--limit", type=float, default=1200, help="seconds of a part of `all`")
    parser.add_argument("--limits", nargs="*", default=[], help="of parts: name=seconds")
    parser.add_argument("--small", action="store_true", help="`all` with small models and sizes")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.what == "all":
        return 1 if measure_all(given) else 0
    if given.stored:
        templates.is_by_matrices = lambda *_: False
    if given.tf32:
        import torch

        torch.set_float32_matmul_precision("high")
    found = []
    if given.what == "steps":
        for name in given.workloads:
            found.append(compare(name, given))
            gpu.release()
    elif given.what == "attention":
        found = [attention(tuple(s), given.rounds) for s in given.sizes or ATTENTION]
    else:
        found = [rates(sizes, given) for sizes in map(tuple, given.sizes or PRODUCTS)]
    if given.record:
        given.record.write_text(json.dumps({"measured": found, **told()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
