"""Levels of instructions that Treadle and its peers are restricted to, and how each is told."""

from __future__ import annotations

import argparse

# XLA's own limit is one of the code that it generates: YNNPACK, which multiplies its matrices,
# takes AVX-512 wherever it is. Without it oneDNN multiplies them, which can be told.
WITHOUT_YNNPACK = "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INVALID"

# By Treadle's names, what PyTorch, oneDNN, MKL, OpenBLAS and XLA call them.
LEVELS: dict[str, dict[str, str]] = {
    "native": {},
    "x86-64-v3": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "XLA_FLAGS": f"--xla_cpu_max_isa=AVX2 {WITHOUT_YNNPACK}",
    },
    "x86-64-v4": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "OPENBLAS_CORETYPE": "SkylakeX",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX512",
    },
}
SHORT = {"v3": "x86-64-v3", "v4": "x86-64-v4"}


def add_target(parser: argparse.ArgumentParser) -> None:
    """The option --target, whose value is one of the levels' names."""
    parser.add_argument(
        "--target",
        type=lambda given: SHORT.get(given, given),
        choices=list(LEVELS),
        default="native",
        help="instructions of all contenders: native, v3 (AVX2) or v4 (AVX-512)",
    )


def restricted(target: str) -> dict[str, str]:
    """The variables that restrict every contender."""
    return LEVELS[target] | {"TREADLE_TARGET": target}
