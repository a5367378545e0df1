"""A GPU's code in the plan cache: launches, machine code, choices of libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping

from treadle.backends.stored import packed_objects, unpacked_objects
from treadle.base.records import from_json, to_json
from treadle.kernel.launch import CooperativeLaunch, Launch
from treadle.kernel.plan import Plan
from treadle.runtime.cuda.code import CudaCode
from treadle.runtime.cuda.compiler import is_cubin
from treadle.schedule.templates import LibraryCallKey

WORDS = 8  # of an algorithm, as cuBLASLt describes it
_PLAN = "routine "  # begins the names of a library's plans


def packed_code(code: CudaCode) -> dict[str, bytes]:
    return {
        **packed_objects(code.cubins),
        "launches": to_json(code.launches).encode(),
        "cooperative": to_json(code.cooperative).encode(),
        "algorithms": json.dumps(code.algorithms).encode(),
        "without": to_json(sorted(code.without)).encode(),
        **{f"{_PLAN}{entry}": plan for entry, plan in code.call_plans.items()},
    }


def unpacked_code(parts: Mapping[str, bytes], plan: Plan) -> CudaCode | None:
    """What was packed; None, or an error of reading, for anything else."""
    found = CudaCode(
        from_json(tuple[Launch, ...], parts["launches"]),
        from_json(tuple[CooperativeLaunch, ...], parts["cooperative"]),
        unpacked_objects(parts),
        {str(k): [int(w) for w in v] for k, v in json.loads(parts["algorithms"]).items()},
        {int(n.removeprefix(_PLAN)): d for n, d in parts.items() if n.startswith(_PLAN)},
        frozenset(from_json(tuple[LibraryCallKey, ...], parts["without"])),
    )
    is_whole = len(found.launches) == len(plan.entries) and all(map(is_cubin, found.cubins))
    has_words = all(len(words) == WORDS for words in found.algorithms.values())
    return found if is_whole and has_words else None
