"""In and out: PyTorch, ONNX, GGUF, NumPy and Keras files, scikit-learn, Optuna, tables.

Each part is a module of its own that is imported when it is first named, because each needs a
library that is an extra: `td.interop.onnx` imports `onnx` and nothing else does.
"""

import importlib as _importlib

_PARTS = (
    "datasets",
    "gguf",
    "keras",
    "npz",
    "onnx",
    "optuna",
    "sklearn",
    "tables",
    "torch",
    "torch_files",
)


def __getattr__(name: str) -> object:
    if name not in _PARTS:
        raise AttributeError(
            f"treadle.interop has no {name!r}. It has {', '.join(_PARTS)}: import one by name."
        )
    return _importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS})
