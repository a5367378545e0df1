"""What a GPU's program is made of beside its plan, as data that can be stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.kernel.launch import CooperativeLaunch, Launch
from treadle.runtime.cuda.calls import LibraryCalls


@dataclass(frozen=True, slots=True)
class CudaCode:
    """Launches by entry, machine code, and what was chosen of the libraries."""

    launches: tuple[Launch, ...]
    cooperative: tuple[CooperativeLaunch, ...]
    cubins: Sequence[bytes]  # may still be under way
    algorithms: Mapping[str, list[int]] = field(default_factory=dict)  # of cuBLASLt, by matmul
    call_plans: Mapping[int, bytes] = field(default_factory=dict)  # of cuDNN, by entry
    without: frozenset[Any] = frozenset()  # library calls that turned out not to exist
    calls: LibraryCalls | None = None  # of cuDNN, whose plans are under way; not stored
