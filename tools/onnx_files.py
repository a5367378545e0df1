"""Writes tests/onnx_files: what PyTorch's exporter makes of small models, with inputs and outputs.

    python tools/onnx_files.py

The models are those of tests/onnx_torch.py. Notes of where nodes came from are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from onnx_torch import MODELS, exported  # noqa: E402

FOLDER = ROOT / "tests" / "onnx_files"


def without_notes(graph: Any) -> None:
    del graph.value_info[:]
    graph.ClearField("doc_string")
    for part in (graph, *graph.node, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("doc_string")
        del part.metadata_props[:]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in MODELS:
        _, data, x, outputs = exported(name, opset_version=18 if name == "cnn" else 20)
        model = onnx.ModelProto.FromString(data)
        del model.metadata_props[:]
        without_notes(model.graph)
        (FOLDER / f"{name}.onnx").write_bytes(model.SerializeToString())
        np.savez_compressed(FOLDER / f"{name}.npz", x, *outputs)
        print(name, (FOLDER / f"{name}.onnx").stat().st_size)


if __name__ == "__main__":
    main()
