"""Programs to look at: their kernels, memory, certificate and times, on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.backends.registry import backend
from treadle.base.errors import ArgumentError
from treadle.compile_report import CompileOptions, CompileReport, Profile
from treadle.runtime.executable import Executable

if TYPE_CHECKING:
    from treadle.backends.views import KernelView, MemoryView
    from treadle.verify.certificate.certificate import Certificate


def kernels_of(
    program: Executable, report: CompileReport, options: CompileOptions
) -> tuple[KernelView, ...]:
    """The distinct kernels of a program on the report's device; the oracle has none."""
    # Looking at kernels brings the scheduler: importing Treadle stays light.
    from treadle.backends import views

    return views.kernels_of(report.device, program, options)


def certificate_of(
    report: CompileReport, options: CompileOptions, is_parallel: bool = False
) -> Certificate:
    """What has been compiled so far, to be checked by a program that shares nothing with this."""
    if is_parallel:
        raise ArgumentError(
            "certificate",
            "the step is data-parallel: its graph is cut where shards exchange what they have",
            'Compile without parallel= for one, or with CompileOptions(verify="full"): that glues '
            "shards and ranks and compares every kernel.",
        )
    # Writing one brings proofs of rules: importing Treadle stays light.
    from treadle.verify.certificate import certificate

    return certificate.certificate_of(report, str(options.verify))


def memory_of(
    program: Executable, report: CompileReport, options: CompileOptions
) -> MemoryView | None:
    """What a program has in memory at its peak; None on the oracle."""
    from treadle.backends import views

    return views.memory_of(report.device, program, options)


def profile(
    program: Executable, values: Mapping[str, Any], report: CompileReport, options: CompileOptions
) -> Profile:
    """What each kernel of a program takes on the report's device."""
    return backend(report.device).profile(program, values, options)
