"""What a device can do at most, measured once and kept on disk: what profiles are compared with."""

from __future__ import annotations

import json
from typing import Any

from treadle.backends.protocol import Toolchain
from treadle.runtime.cache import fingerprint, plan_cache
from treadle.runtime.executable import Ceilings


def rates_of(toolchain: Toolchain[Any, Any]) -> Ceilings:
    """What was measured for this device before, or is now."""
    cache = plan_cache()
    stored = None if cache is None else cache.get(_key(toolchain))
    found = None if stored is None else _read(stored.get("rates", b""))
    return found or measured(toolchain)


def measured(toolchain: Toolchain[Any, Any]) -> Ceilings:
    found, cache = toolchain.ceilings(), plan_cache()
    if cache is not None:
        cache.put(_key(toolchain), {"rates": json.dumps(found).encode()})
    return found


def _key(toolchain: Toolchain[Any, Any]) -> str:
    return fingerprint(["rates", toolchain.machine])


def _read(content: bytes) -> Ceilings | None:
    try:
        flops, nbytes = (float(x) for x in json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return None
    return Ceilings(flops, nbytes) if flops > 0 and nbytes > 0 else None
