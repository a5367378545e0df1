"""One more token of a 135M decoder, batch 1: Treadle, `transformers`, and what memory allows.

usage: python bench/decode.py [--dtype bfloat16] [--rounds 7] [--device cpu] [--out FILE]
       python bench/decode.py --threads 1 --clock process_time   where others are busy

The shape is SmolLM2-135M's, the values are random. Contenders take turns, each in a process of its
own; the ratio is the median over rounds. The bound is the time to read the weights once, at the
rate at which all threads together read memory in the same run. On a GPU the peer is a decoder in
plain PyTorch with a static cache, compiled with mode "reduce-overhead".
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import ceilings
from decode_peers import shape
from turns import (
    CLOCKS,
    Patience,
    Ratio,
    Turns,
    Unable,
    Worker,
    machine,
    take_turns,
    use_threads,
)

PEERS = {"cpu": ("bfloat16", "float32", "float32 static"), "cuda": ("compiled",)}
TURN = 0.5  # seconds


def main() -> None:
    options = _options()
    environment = use_threads(options.threads) if options.device == "cpu" else {}
    peers = PEERS[options.device] if options.peers is None else options.peers
    names = ["treadle", *peers]
    names += ["read"] if options.device == "cpu" else []
    with tempfile.TemporaryDirectory() as folder:
        task = _task(options, Path(folder))
        workers = _built(names, task, environment)
        try:
            patience = Patience(options.patience)
            turns = take_turns(workers, options.rounds, TURN, patience, options.clock)
        finally:
            for worker in workers:
                worker.close()
    found = _row(turns, task)
    print(_text(found))
    if turns.disturbed:
        print(turns)
    if options.out:
        options.out.write_text(json.dumps(found | {"machine": machine()}, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=list(PEERS))
    parser.add_argument("--dtype", default="bfloat16", help="of Treadle's values in memory")
    parser.add_argument("--precision", help="of Treadle's products; on a GPU bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", nargs="*", help="all of the device, unless some are named")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for quiet")
    parser.add_argument("--clock", default="perf_counter", choices=list(CLOCKS))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _task(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Random values in a folder that everybody reads."""
    from treadle import models

    model = models.Llama(shape())
    models.save(model, folder)
    narrow = "bfloat16" if options.device == "cuda" else "float32"
    elements = sum(d.type.size for d in model.declarations().values())
    return {
        "folder": str(folder),
        "device": options.device,
        "dtype": options.dtype,
        "precision": options.precision or narrow,
        "nbytes": elements * (4 if options.dtype == "float32" else 2),
    }


def _built(names: list[str], task: dict[str, Any], environment: dict[str, str]) -> list[Worker]:
    found: list[Worker] = []
    for name in names:
        worker = Worker("decode_peers", name, environment)
        try:
            answer = worker.ask("build", task=task, memory=False)
        except Unable as error:
            worker.close()
            print(f"{name} cannot run: {error}")
            continue
        tokens = [int(t) for t in answer["values"]] if name != "read" else "–"
        print(f"{name}: first token after {answer['first_s']:.1f} s; tokens {tokens}", flush=True)
        found.append(worker)
    return found


def _row(turns: Turns, task: dict[str, Any]) -> dict[str, Any]:
    ms = {name: statistics.median(each) for name, each in turns.ms.items()}
    ours = turns.ms["treadle"]
    row: dict[str, Any] = {"ms": ms, "best_ms": turns.best, "nbytes": task["nbytes"]}
    row["over"] = {
        name: str(Ratio.of(each, ours))
        for name, each in turns.ms.items()
        if name not in ("treadle", "read")
    }
    if "read" in turns.ms:
        read = ceilings.BYTES * ceilings.threads()  # bytes that a step of it reads
        bounds = [task["nbytes"] * each / read for each in turns.ms["read"]]
        row["bound_ms"] = statistics.median(bounds)
        row["of_bound"] = str(Ratio.of(bounds, ours))
        row["read_gb_s"] = read / ms["read"] / 1e6
        row["best_bound_ms"] = task["nbytes"] * turns.best["read"] / read
    return row


def _text(row: dict[str, Any]) -> str:
    lines = [f"{'':<16}{'ms a token':>12}{'tokens/s':>10}{'best ms':>10}"]
    for name, each in row["ms"].items():
        if name != "read":
            best = row["best_ms"][name]
            lines.append(f"{name:<16}{each:>12.2f}{1e3 / each:>10.1f}{best:>10.2f}")
    lines += [f"Treadle is {ratio} times as fast as {n}" for n, ratio in row["over"].items()]
    if "bound_ms" in row:
        lines.append(
            f"{row['nbytes'] / 1e6:.0f} MB of weights at {row['read_gb_s']:.1f} GB/s take "
            f"{row['bound_ms']:.2f} ms: {row['of_bound']} of the bound is reached"
        )
        best = row["best_bound_ms"]
        share = best / row["best_ms"]["treadle"]
        lines.append(f"the best samples of both: {best:.2f} ms, {share:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
