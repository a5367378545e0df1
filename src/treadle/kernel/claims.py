"""What was checked of a compiled program, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that was looked at: established, or why not. One that is wrong is an error.

    Of a kernel: the buffers of the call, the iterations that ran by the name of their loop, and the
    addresses at which its results were compared with the graph.
    """

    kind: str  # "kernel" or "gradient"
    name: str
    lines: tuple[str, ...] = ()  # of the model
    buffers: tuple[str, ...] = ()
    iterations: dict[str, list[int]] = field(default_factory=dict)
    compared: dict[str, list[int]] = field(default_factory=dict)
    reason: str = ""  # why it is not established; nothing where it is

    @property
    def is_established(self) -> bool:
        return not self.reason

    @property
    def record(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)

    def __str__(self) -> str:
        told = f"not established: {self.reason}" if self.reason else "established"
        return f"{self.kind} {self.name}: {told}"
