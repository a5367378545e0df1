"""What cuDNN computes in a program: each call with its plan, chosen before or now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from treadle.kernel.launch import Launch
from treadle.runtime.cuda.conv import Convolution
from treadle.runtime.cuda.device import Block
from treadle.runtime.cuda.dnn import Attention


def chosen_routines(
    launches: Sequence[Launch],
    algorithms: dict[str, list[int]],
    is_deterministic: bool,
    memory: Callable[[int], list[int]],
) -> dict[int, Attention | Convolution]:
    """Routines by entry. Plans that are timed, on memory for an entry, go to the algorithms."""
    found: dict[int, Attention | Convolution] = {}
    for i, launch in enumerate(launches):
        call = launch.routine
        if call is None:
            continue
        if "conv" not in call.name:
            found[i] = Attention(call, is_deterministic)
            continue
        made = found[i] = Convolution(call, is_deterministic)
        key = f"{is_deterministic} {call}"
        if key in algorithms:
            made.use(algorithms[key])
            continue
        made.choose(memory(i), _Workspace())
        algorithms[key] = made.words
    return found


class _Workspace:
    """Memory that is as large as it was asked for."""

    def __init__(self) -> None:
        self.block: Block | None = None

    def __call__(self, size: int) -> int:
        self.block = Block(size)
        return self.block.address
