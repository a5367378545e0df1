"""What cuDNN computes in a program: each call with its plan, from before or made now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from treadle.kernel.launch import Launch, LibraryLaunch
from treadle.runtime.cuda.attention import planned_attention
from treadle.runtime.cuda.conv import planned_convolution
from treadle.runtime.cuda.dnn import DnnCall, unpacked


def chosen_library_calls(
    launches: Sequence[Launch],
    plans: dict[int, bytes],
    is_deterministic: bool,
    memory: Callable[[int], list[int]],
) -> dict[int, DnnCall]:
    """Calls by entry; what is planned here, on memory for an entry, is added to the plans."""
    found: dict[int, DnnCall] = {}
    for i, launch in enumerate(launches):
        if launch.called is None:
            continue
        made = unpacked(launch.called, plans[i]) if i in plans else None
        if made is None:
            made = _planned(launch.called, is_deterministic, partial(memory, i))
            plan = made.packed()
            plans |= {i: plan} if plan else {}
        found[i] = made
    return found


def _planned(
    call: LibraryLaunch, is_deterministic: bool, memory: Callable[[], list[int]]
) -> DnnCall:
    if "conv" in call.name:
        return planned_convolution(call, is_deterministic, memory)
    return planned_attention(call, is_deterministic)
