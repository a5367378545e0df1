"""Matrix products of training: Treadle, OpenBLAS and PyTorch in turns; float32.

usage: python bench/products.py [product ...] [--rounds 5] [--threads 2] [--patience 20]
                                [--target v3] [--clock process_time] [--json FILE]

GFLOP/s are medians over the rounds. Ratios are Treadle's rate over another's, higher is faster: the
median of the rounds' ratios. `treadle` is a program called as a user calls it, from arrays to a new
array, which counts for small products; `native` is the same program's machine code alone, entered
as the others are: through one foreign call. The ceiling is the rate of multiply-adds in registers,
measured in turns with the products.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import json
import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ceilings
import numpy as np
from levels import add_target, restricted
from rich.console import Console
from rich.table import Table
from turns import (
    CLOCKS,
    Contender,
    Patience,
    Ratio,
    Running,
    Turns,
    Unable,
    Worker,
    machine,
    take_turns,
    use_threads,
)

import treadle as td

TURN = 0.12  # seconds
OURS = ("treadle", "native")
CLOSE = 1e-4


@dataclass(frozen=True)
class Product:
    """(m, k) · (k, n). T is an operand that lies transposed in memory, N one that does not."""

    m: int
    k: int
    n: int
    layout: str = "NN"

    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        """As they lie in memory."""
        rng = np.random.default_rng(0)
        a = (self.m, self.k) if self.layout[0] == "N" else (self.k, self.m)
        b = (self.k, self.n) if self.layout[1] == "N" else (self.n, self.k)
        return rng.standard_normal(a, np.float32), rng.standard_normal(b, np.float32)

    def views(self, a: Any, b: Any) -> tuple[Any, Any]:
        """The factors, whatever way they lie."""
        return (a if self.layout[0] == "N" else a.T), (b if self.layout[1] == "N" else b.T)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


# x · Wᵀ forward, ct · W for the inputs' and ctᵀ · x for the weights' gradients: NT, NN, TN.
PRODUCTS = {
    "64": Product(64, 64, 64),
    "128": Product(128, 128, 128),
    "512": Product(512, 512, 512),
    "1024": Product(1024, 1024, 1024),
    "gpt": Product(1024, 384, 1536),
    "gpt2": Product(4096, 768, 3072),
    "mlp forward": Product(128, 784, 128, "NT"),
    "mlp dW": Product(128, 128, 784, "TN"),
    "mlp_wide forward": Product(256, 1024, 1024, "NT"),
    "mlp_wide dX": Product(256, 1024, 1024, "NN"),
    "mlp_wide dW": Product(1024, 256, 1024, "TN"),
    "gpt_char forward": Product(1024, 384, 1536, "NT"),
    "gpt_char dX": Product(1024, 1536, 384, "NN"),
    "gpt_char dW": Product(1536, 1024, 384, "TN"),
    "gpt_nano forward": Product(768, 128, 512, "NT"),
    "gpt_nano dX": Product(768, 512, 128, "NN"),
    "gpt_nano dW": Product(512, 768, 128, "TN"),
    "lstm forward": Product(32, 256, 1024, "NT"),
    "lstm dX": Product(32, 1024, 256, "NN"),
    "lstm dW": Product(1024, 2048, 256, "TN"),
}


# --- contenders -------------------------------------------------------------------------------


def checksum(product: Product, result: np.ndarray) -> float:
    """The error against float64, as a part of the largest element."""
    a, b = product.views(*(x.astype(np.float64) for x in product.operands()))
    exact = a @ b
    return float(np.abs(result - exact).max() / np.abs(exact).max())


def treadle_start(product: Product) -> Running:
    a, b = product.operands()
    program = compiled(product)
    last: list[Any] = [None]

    def step() -> None:
        last[0] = program(a, b)

    return Running(step, lambda: None, lambda: checksum(product, last[0]))


def native_start(product: Product) -> Running:
    """Looks inside: the loaded program, where its result is, and the threads that run it."""
    from treadle.runtime.cpu.threads import pool

    a, b = product.operands()
    program = compiled(product)
    program(a, b)  # now it has the addresses of a and b
    built, _ = program._forward._programs.get("bench", (a, b))
    native: Any = built.program
    workers, script = pool(native.threads), native._address
    memory = native._arrays[native.plan.outputs[0].slot].reshape(-1)
    out = memory[: product.m * product.n].reshape(product.m, product.n)
    out[:] = np.nan  # so that the steps are what is checked
    kept = (a, b, native)

    def step() -> None:
        workers.run(script)

    return Running(step, lambda: kept, lambda: checksum(product, out))


def compiled(product: Product) -> Any:
    def multiply(a: Any, b: Any) -> Any:
        a, b = product.views(a, b)
        return a @ b

    specs = [td.Spec(x.shape) for x in product.operands()]
    return td.compile(multiply, *specs, device="cpu")


def openblas_start(product: Product) -> Running:
    """scipy-openblas32 where it is installed; else NumPy, whose wheels bring OpenBLAS along."""
    a, b = product.operands()
    out = np.zeros((product.m, product.n), np.float32)
    if importlib.util.find_spec("scipy_openblas32") is None:
        left, right = product.views(a, b)
        step: Callable[[], object] = functools.partial(np.matmul, left, right, out=out)
    else:
        step = openblas_call(product, a, b, out)
    return Running(step, lambda: None, lambda: checksum(product, out))


def openblas_call(
    product: Product, a: np.ndarray, b: np.ndarray, out: np.ndarray
) -> Callable[[], object]:
    import scipy_openblas32

    folder = Path(scipy_openblas32.get_lib_dir())
    library = ctypes.CDLL(str(next(folder.glob(f"lib{scipy_openblas32.get_library()}.*"))))
    library.scipy_openblas_set_num_threads(len(os.sched_getaffinity(0)))
    sgemm = library.scipy_cblas_sgemm
    whole, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    sgemm.restype = None
    sgemm.argtypes = [whole] * 6 + [real, pointer, whole, pointer, whole, real, pointer, whole]
    transposed = {"N": 111, "T": 112}
    t = [transposed[x] for x in product.layout]
    sizes = (product.m, product.n, product.k)
    arguments = (101, *t, *sizes, 1.0, a.ctypes.data, a.shape[1], b.ctypes.data, b.shape[1])
    kept = (a, b)

    def step() -> object:
        sgemm(*arguments, 0.0, out.ctypes.data, product.n)
        return kept

    return step


def torch_start(product: Product) -> Running:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    a, b = product.views(*map(torch.tensor, product.operands()))
    out = torch.zeros((product.m, product.n))
    step = functools.partial(torch.mm, a, b, out=out)
    return Running(step, lambda: None, lambda: checksum(product, out.numpy()))


def contender(
    name: str, modules: tuple[str, ...], start: Callable[[Product], Running]
) -> Contender:
    def prepare(task: dict[str, Any]) -> Callable[[], Running]:
        return functools.partial(start, Product(**task))

    return Contender(name, modules, prepare)


CONTENDERS = {
    "treadle": contender("treadle", ("treadle",), treadle_start),
    "native": contender("native", ("treadle",), native_start),
    "openblas": contender("openblas", (), openblas_start),
    "torch": contender("torch", ("torch",), torch_start),
}


# --- measuring --------------------------------------------------------------------------------


class Benchmark:
    """Workers that live through all products."""

    def __init__(self, stack: ExitStack, console: Console, options: argparse.Namespace):
        self.console, self.options = console, options
        names = [n for n in CONTENDERS if n != "torch" or importlib.util.find_spec("torch")]
        self.workers = [self._worker(stack, "products", n) for n in names]
        self.ceilings = {n: self._worker(stack, "ceilings", n) for n in ceilings.CONTENDERS}
        for worker in self.ceilings.values():
            worker.ask("build", task={}, memory=False)

    @staticmethod
    def _worker(stack: ExitStack, module: str, name: str) -> Worker:
        worker = Worker(module, name, {})
        stack.callback(worker.close)
        return worker

    def _turns(self, workers: list[Worker]) -> Turns:
        patience = Patience(self.options.patience)
        return take_turns(workers, self.options.rounds, TURN, patience, self.options.clock)

    def bandwidth(self) -> dict[str, float]:
        """GB/s; a copy's bytes are counted twice, read and written."""
        both = [self.ceilings["read"], self.ceilings["copy"]]
        turns = self._turns(both)
        ms = {n: statistics.median(v) for n, v in turns.ms.items()}
        for worker in both:
            worker.close()  # their arrays are not needed any more
        moved = ceilings.BYTES * ceilings.threads() / 1e6
        return {"read": moved / ms["read"], "copy": 2 * moved / ms["copy"]}

    def measure(self, name: str) -> dict[str, Any]:
        product = PRODUCTS[name]
        able = []
        for worker in self.workers:
            try:
                answer = worker.ask("build", task=asdict(product), memory=False)
            except Unable as error:
                self.console.print(f"{name}: {error}", style="bold red", markup=False)
                continue
            able.append(worker)
            if not max(answer["values"]) <= CLOSE:
                text = f"{name}: {worker.name} IS WRONG by {max(answer['values']):.1e}"
                self.console.print(text, style="bold red", markup=False)
        turns = self._turns([*able, self.ceilings["fma"]])
        if turns.disturbed:
            self.console.print(f"{name}: {turns}", style="bold red", markup=False)
        ms = turns.ms
        flops = {n: ceilings.fma_flops() if n == "fma" else product.flops for n in ms}
        rates = {n: [flops[n] / x / 1e6 for x in each] for n, each in ms.items()}
        pairs = [(a, b) for a in OURS for b in ms if a in ms and b not in OURS]
        return {
            "product": name,
            **asdict(product),
            "disturbed_rounds": turns.disturbed,
            "is_rough": turns.are_rough,
            "gflops": {n: statistics.median(each) for n, each in rates.items()},
            "ratios": {f"{a}/{b}": asdict(Ratio.of(rates[a], rates[b])) for a, b in pairs},
        }


def geomeans(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of each ratio, over the rows that are not rough if there are any."""
    rows = [row for row in rows if not row["is_rough"]] or rows
    keys = dict.fromkeys(k for row in rows for k in row["ratios"])
    each = {k: [r["ratios"][k]["median"] for r in rows if k in r["ratios"]] for k in keys}
    return {k: statistics.geometric_mean(v) for k, v in each.items()}


SHOWN = {
    "treadle/openblas": "treadle /openblas",
    "native/openblas": "native /openblas",
    "native/torch": "native /torch",
    "native/fma": "native /ceiling",
}


def table(rows: list[dict[str, Any]], means: dict[str, float]) -> Table:
    rates = list(dict.fromkeys(n for row in rows for n in row["gflops"]))
    ratios = [k for k in SHOWN if k in means]
    found = Table(title="GFLOP/s, and Treadle's rate over the other's (higher is faster)")
    found.add_column("product", no_wrap=True)
    found.add_column("m×k×n", no_wrap=True)
    for head in (*rates, *(SHOWN[k] for k in ratios)):
        found.add_column("ceiling" if head == "fma" else head, justify="right")
    for row in rows:
        sizes = f"{row['m']}×{row['k']}×{row['n']} {row['layout']}"
        cells = [f"{row['gflops'][n]:.1f}" if n in row["gflops"] else "–" for n in rates]
        cells += [
            f"{row['ratios'][k]['median']:.2f}" if k in row["ratios"] else "–" for k in ratios
        ]
        mark = " (rough)" if row["is_rough"] else ""
        found.add_row(row["product"] + mark, sizes, *cells)
    found.add_section()
    found.add_row("geomean", "", *[""] * len(rates), *(f"{means[k]:.2f}" for k in ratios))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("products", nargs="*", help=f"of {', '.join(PRODUCTS)}; all if none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--patience", type=float, default=20, help="seconds a product may wait for others (20)"
    )
    parser.add_argument("--clock", choices=list(CLOCKS), default="perf_counter")
    add_target(parser)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    unknown = [p for p in options.products if p not in PRODUCTS]
    if unknown or options.rounds < 1 or options.threads < 1:
        parser.error(f"{', '.join(unknown) or 'rounds and threads are at least 1'}: see --help")
    console = Console(width=None if os.isatty(1) else 160, highlight=False)
    os.environ.update(use_threads(options.threads) | restricted(options.target))
    head = machine() | {"threads": options.threads, "rounds": options.rounds}
    head["target"] = options.target
    with ExitStack() as stack:
        benchmark = Benchmark(stack, console, options)
        head["bandwidth_gb_s"] = benchmark.bandwidth()
        chosen = options.products or list(PRODUCTS)
        rows = [benchmark.measure(name) for name in chosen]
    head["fma_gflops"] = max(row["gflops"]["fma"] for row in rows)
    means = geomeans(rows)
    console.print(f"{head['processor']}, {options.threads} threads, load {head['load']:.2f} before")
    console.print(
        "memory GB/s: {read:.1f} read, {copy:.1f} copied".format(**head["bandwidth_gb_s"])
    )
    console.print(table(rows, means))
    if options.json:
        text = json.dumps(head | {"products": rows, "geomeans": means}, indent=1)
        options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
