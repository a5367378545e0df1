"""What cuDNN computes in a program: each call with its plan, from before or made now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from treadle.kernel.launch import Launch, LibraryLaunch
from treadle.runtime.cuda.attention import planned_attention
from treadle.runtime.cuda.conv import ConvCall, planned_convolutions, unpacked_convolution
from treadle.runtime.cuda.dnn import DnnCall, unpacked

Called = DnnCall | ConvCall


def chosen_library_calls(
    launches: Sequence[Launch],
    plans: dict[int, bytes],
    is_deterministic: bool,
    memory: Callable[[int], list[int]],
) -> dict[int, Called]:
    """Calls by entry; what is planned here, on memory for an entry, is added to the plans."""
    calls = {i: launch.called for i, launch in enumerate(launches) if launch.called is not None}
    found: dict[int, Called] = {}
    for i, call in calls.items():
        made = _unpacked(call, plans[i]) if i in plans else None
        if made is not None:
            found[i] = made
    new = {i: call for i, call in calls.items() if i not in found}
    convolutions = {i: call for i, call in new.items() if "conv" in call.name}
    for i in new.keys() - convolutions.keys():
        found[i] = planned_attention(new[i], is_deterministic)
    if convolutions:
        found |= planned_convolutions(convolutions, is_deterministic, memory)
    for i in new:
        plan = found[i].packed()
        plans |= {i: plan} if plan else {}
    return found


def _unpacked(call: LibraryLaunch, plan: bytes) -> Called | None:
    return unpacked_convolution(call, plan) if "conv" in call.name else unpacked(call, plan)
