"""`treadle info`: versions, devices, threads and the plan cache."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from typing import Any

import treadle as td
from treadle.kernel.machine import NATIVE
from treadle.pipeline import DEVICES, choose_device
from treadle.runtime.cache import plan_cache
from treadle.runtime.cpu.native import chosen_target, compiler_version
from treadle.runtime.cpu.processors import default_threads
from treadle.runtime.cuda.device import device, why_not
from treadle.runtime.cuda.dnn import dnn_version

NEEDED = ("llvmlite", "ml_dtypes", "numpy", "safetensors")
OPTIONAL = (
    "cuda-bindings",
    "matplotlib",
    "mlflow",
    "nvidia-cudnn-frontend",
    "tensorboard",
    "torch",
    "wandb",
)


def run_info(as_json: bool = False) -> int:
    """Print it."""
    facts = gathered()
    print(json.dumps(facts, indent=2) if as_json else shown(facts))
    return 0


def gathered() -> dict[str, Any]:
    """Everything, as JSON has it."""
    target = chosen_target(NATIVE)
    return {
        "treadle": td.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "devices": list(DEVICES),
        "default device": choose_device("auto"),
        "cpu": {"name": target.cpu, "float32 lanes": target.width, "threads": default_threads()},
        "gpu": gpu(),
        "compiler": compiler_version(),
        "packages": {name: version(name) for name in NEEDED},
        "optional packages": {name: version(name) for name in OPTIONAL},
        "plan cache": _cache(),
    }


def gpu() -> dict[str, Any]:
    """The GPU that would be used, or why there is none."""
    cause = why_not()
    if cause is not None:
        return {"usable": False, "why not": cause}
    found = device()
    free, total = found.memory()
    return {
        "usable": True,
        "name": found.name,
        "architecture": found.architecture,
        "free bytes": free,
        "bytes": total,
        "attention": dnn_version(),
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cache() -> dict[str, Any] | None:
    cache = plan_cache()
    if cache is None:
        return None
    contents = cache.info()
    return {
        "folder": str(contents.folder),
        "entries": contents.entries,
        "bytes": contents.bytes,
        "limit": cache.limit,
    }


def shown(facts: dict[str, Any]) -> str:
    """As lines of a name and what it is."""
    cpu, cache = facts["cpu"], facts["plan cache"]
    packages = facts["packages"] | facts["optional packages"]
    there = ", ".join(f"{name} {v}" for name, v in packages.items() if v is not None)
    missing = ", ".join(name for name, v in packages.items() if v is None)
    devices = ", ".join(
        f"{name} (default)" if name == facts["default device"] else name
        for name in facts["devices"]
    )
    rows = {
        "treadle": facts["treadle"],
        "python": f"{facts['python']} on {facts['platform']}",
        "devices": devices,
        "cpu": f"{cpu['name']}, vectors of {cpu['float32 lanes']} float32 (TREADLE_TARGET), "
        f"{cpu['threads']} threads (TREADLE_THREADS)",
        "gpu": _gpu_line(facts["gpu"]),
        "compiler": facts["compiler"],
        "packages": there,
        "not installed": missing or "nothing",
        "plan cache": "off"
        if cache is None
        else f"{cache['folder']}: {cache['entries']} entries, {cache['bytes'] / 1e6:.1f} of "
        f"{cache['limit'] / 1e6:.0f} MB (TREADLE_CACHE, TREADLE_CACHE_MB)",
    }
    return "\n".join(f"{name:<15}{value}" for name, value in rows.items())


def _gpu_line(facts: dict[str, Any]) -> str:
    if not facts["usable"]:
        return f"none: {facts['why not']}"
    free, total = facts["free bytes"] / 2**30, facts["bytes"] / 2**30
    return f"{facts['name']} ({facts['architecture']}), {free:.1f} of {total:.1f} GiB free"
