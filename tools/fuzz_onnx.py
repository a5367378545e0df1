"""Mutated ONNX files: each must load and trace, or be refused with an error of Treadle's.

    nice python tools/fuzz_onnx.py --count 100000 --seed 0 [--seconds 3600] [--keep FOLDER]

Files are the corpus of the tests, what the models of the tests export, and small graphs with loops,
functions and external data. They are changed as bytes, and field by field. A file that takes longer
than `--limit` seconds, more memory than `--memory` MB, or raises anything else is kept, in a
temporary folder of its own if none is given.
"""

from __future__ import annotations

import argparse
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import treadle as td  # noqa: E402
from onnx_models import MODELS  # noqa: E402
from treadle.frontend.scopes import isolated_tracing  # noqa: E402
from treadle.interop.onnx import OnnxModule, export, load  # noqa: E402
from treadle.interop.onnx.reader import wire  # noqa: E402
from treadle.ir.types import TensorType  # noqa: E402
from treadle.nn.tracing import Inputs, trace_model  # noqa: E402

INTERESTING = (0, 1, -1, 2, 3, 7, 127, 255, 1 << 16, 1 << 31, -(1 << 31), 10**12, (1 << 63) - 1)


class TooSlowError(BaseException):
    """Raised by the clock; no `except Exception` stops it."""


def corpus() -> list[bytes]:
    found = [p.read_bytes() for p in sorted((ROOT / "tests" / "onnx_files").glob("*.onnx"))]
    with tempfile.TemporaryDirectory() as folder:
        for make, inputs in MODELS.values():
            for opset in (18, 23):
                export(make(), inputs, Path(folder) / "m.onnx", opset=opset)
                found.append((Path(folder) / "m.onnx").read_bytes())
    return [*found, *map(onnx.ModelProto.SerializeToString, small_graphs())]


def _model(nodes: list[Any], inputs: list[Any], outputs: list[str], **more: Any) -> Any:
    graph = helper.make_graph(
        nodes,
        "small",
        inputs,
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        more.pop("initializers", []),
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, **more)


def small_graphs() -> list[Any]:
    """Bodies, functions, sizes that are computed, and values in other files."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    node, info = helper.make_node, helper.make_tensor_value_info
    body = helper.make_graph(
        [
            node("Add", ["carry", "x"], ["next"]),
            node("Identity", ["go"], ["on"]),
            node("Mul", ["next", "next"], ["row"]),
        ],
        "body",
        [
            info("i", TensorProto.INT64, []),
            info("go", TensorProto.BOOL, []),
            info("carry", TensorProto.FLOAT, [2, 3]),
        ],
        [
            info("on", TensorProto.BOOL, []),
            info("next", TensorProto.FLOAT, [2, 3]),
            info("row", TensorProto.FLOAT, [2, 3]),
        ],
    )
    number = numpy_helper.from_array
    loop = _model(
        [node("Loop", ["n", "", "x"], ["last", "rows"], body=body)],
        [x],
        ["last", "rows"],
        initializers=[number(np.array(3), "n")],
    )
    function = helper.make_function(
        "own",
        "Twice",
        ["a"],
        ["b"],
        [node("Add", ["a", "a"], ["c"]), node("Relu", ["c"], ["b"])],
        [helper.make_opsetid("", 20)],
    )
    called = _model(
        [node("Twice", ["x"], ["h"], domain="own"), node("Twice", ["h"], ["y"], domain="own")],
        [x],
        ["y"],
        functions=[function],
    )
    sized = _model(
        [
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "one"], ["n"]),
            node("Concat", ["minus", "n"], ["t"], axis=0),
            node("Reshape", ["x", "t"], ["r"]),
            node("Unsqueeze", ["r", "axes"], ["r4"]),
            node("Resize", ["r4", "", "scales"], ["big"], mode="linear"),
            node("ConstantOfShape", ["t2"], ["zeros"]),
            node("Range", ["zero", "three", "step"], ["range"]),
            node("Tile", ["range", "twice"], ["tiled"]),
            node("Add", ["big", "zeros"], ["y"]),
        ],
        [x],
        ["y", "tiled"],
        initializers=[
            number(np.array([1]), "one"),
            number(np.array([-1]), "minus"),
            number(np.array([0, 1]), "axes"),
            number(np.array([1, 1, 2, 2], np.float32), "scales"),
            number(np.array([1, 1, 4, 6]), "t2"),
            number(np.array(0.0, np.float32), "zero"),
            number(np.array(3.0, np.float32), "three"),
            number(np.array(0.5, np.float32), "step"),
            number(np.array([2]), "twice"),
        ],
    )
    outside = _model(
        [node("Add", ["x", "w"], ["y"])],
        [x],
        ["y"],
        initializers=[number(np.ones((2, 3), np.float32), "w")],
    )
    weight = outside.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", "24")):
        weight.external_data.add(key=key, value=value)
    return [loop, called, sized, outside]


# Changes


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not found:
            return bytes(found)
        at = rng.randrange(len(found))
        kind = rng.randrange(6)
        if kind == 0:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del found[at : at + rng.choice((1, 2, 8, 64, len(found)))]
        elif kind == 3:
            found[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
        elif kind == 4:
            part = found[at : at + rng.choice((2, 8, 64, 512))]
            found[at:at] = part * rng.choice((1, 2, 8))
        else:
            other = rng.randrange(len(found))
            size = rng.choice((1, 4, 32))
            found[at : at + size] = found[other : other + size]
    return bytes(found)


def changed_fields(data: bytes, rng: random.Random) -> bytes:
    model = onnx.ModelProto.FromString(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        message = model
        for _ in range(rng.randrange(1, 9)):
            inner = [
                m
                for field, value in message.ListFields()
                if field.message_type is not None
                for m in (value if field.is_repeated else [value])
            ]
            if not inner or rng.random() < 0.15:
                break
            message = rng.choice(inner)
        _change(message, rng)
    return model.SerializeToString()


def _change(message: Any, rng: random.Random) -> None:
    fields = message.ListFields()
    if not fields:
        return
    field, value = rng.choice(fields)
    if field.is_repeated:
        _change_list(message, field, value, rng)
    elif field.message_type is not None:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _other(field, value, rng, message))


def _change_list(message: Any, field: Any, values: Any, rng: random.Random) -> None:
    kind = rng.randrange(4)
    if kind == 0:
        del values[rng.randrange(len(values))]
    elif kind == 1:
        values.append(values[rng.randrange(len(values))])
    elif field.message_type is not None:
        order = list(values)
        rng.shuffle(order)
        copies = [type(v).FromString(v.SerializeToString()) for v in order]
        del values[:]
        values.extend(copies)
    else:
        at = rng.randrange(len(values))
        values[at] = _other(field, values[at], rng, message)


def _other(field: Any, value: Any, rng: random.Random, message: Any) -> Any:
    """Another value of a field's type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        low, high = (-(1 << 31), (1 << 31) - 1)
        if field.cpp_type in (field.CPPTYPE_INT64,):
            low, high = -(1 << 63), (1 << 63) - 1
        if field.cpp_type == field.CPPTYPE_UINT64:
            low, high = 0, (1 << 64) - 1
        if field.cpp_type == field.CPPTYPE_ENUM:
            return rng.choice(list(field.enum_type.values_by_number))
        return min(high, max(low, rng.choice((*INTERESTING, value + 1, value - 1))))
    if isinstance(value, float):
        return rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e30, value * 2))
    if isinstance(value, bytes):
        return changed_bytes(value, rng)
    names = ("", "x", "w", "Loop", "Twice", "../w.bin", "/etc/passwd", value + "a", value[:-1])
    return rng.choice(names)


# Judging


def judged(path: Path) -> str:
    """What became of a file: "refused", "traced", or a reason why it is kept."""
    try:
        module = load(path)
        _trace(module)
    except td.TreadleError as error:
        return "refused" if len(str(error)) < 4000 else "a long message"
    except MemoryError:
        return "memory"
    except TooSlowError:
        return "time"
    except Exception:
        return traceback.format_exc()
    return "traced"


def _trace(module: OnnxModule) -> None:
    specs = []
    for port in module.program.body.inputs:
        shape = tuple(n if isinstance(n, int) else 2 for n in port.shape or ())
        specs.append(TensorType(shape, port.dtype or td.float32))
    with isolated_tracing("fuzz"):
        trace_model(module, lambda m, batch: m(*batch), Inputs.of(tuple(specs)), training=False)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--count", type=int, default=100_000)
    arguments.add_argument("--seconds", type=float, default=3600.0)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--limit", type=int, default=20)
    arguments.add_argument("--memory", type=int, default=4000)
    arguments.add_argument("--keep", type=Path, default=None)
    chosen = arguments.parse_args()
    wire.SMALL = 0  # count the messages of small files too
    limit = chosen.memory << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def ring(*_: object) -> None:
        raise TooSlowError

    signal.signal(signal.SIGALRM, ring)
    files, counts, start, longest = corpus(), Counter(), time.monotonic(), 0.0
    keep = chosen.keep or Path(tempfile.mkdtemp(prefix="onnx-fuzz-"))
    keep.mkdir(parents=True, exist_ok=True)
    print(f"what is found is kept in {keep}")
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    weights = [
        1 / (2000 + len(data)) for data in files
    ]  # small ones say as much and take less time
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        path = Path(folder) / "m.onnx"
        (Path(folder) / "w.bin").write_bytes(bytes(24))
        for number in range(chosen.count):
            if time.monotonic() - start > chosen.seconds:
                break
            rng = random.Random(f"{chosen.seed}:{number}")
            (data,) = rng.choices(files, weights)
            change = changed_bytes if rng.random() < 0.4 else changed_fields
            path.write_bytes(change(data, rng))
            began = time.monotonic()
            signal.alarm(chosen.limit)
            found = judged(path)
            signal.alarm(0)
            longest = max(longest, time.monotonic() - began)
            counts[found if found in ("refused", "traced") else "kept"] += 1
            if number % 10_000 == 9_999:
                print(f"{dict(counts)} after {time.monotonic() - start:.0f} s", flush=True)
            if found not in ("refused", "traced"):
                print(number, found.strip().splitlines()[-1], flush=True)
                (keep / f"{chosen.seed}-{number}.onnx").write_bytes(path.read_bytes())
                (keep / f"{chosen.seed}-{number}.txt").write_text(found)
    seconds = time.monotonic() - start
    print(f"{dict(counts)} in {seconds:.0f} s; the longest took {longest:.2f} s")


if __name__ == "__main__":
    main()
