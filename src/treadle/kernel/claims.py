"""What was checked of a compiled program, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that was looked at: established, or why not. One that is wrong is an error.

    Of a kernel: the buffers of the call, the iterations that ran by the name of their loop, and the
    addresses at which its results were compared with the graph. Of a library's call, which is
    attested by running it: how many elements were compared with the oracle, how far they are off at
    most, and which part that is of what the op's contract allows.
    """

    kind: str  # "kernel", "gradient" or "library"
    name: str
    lines: tuple[str, ...] = ()  # of the model
    buffers: tuple[str, ...] = ()
    iterations: dict[str, list[int]] = field(default_factory=dict)
    compared: dict[str, list[int]] = field(default_factory=dict)
    reason: str = ""  # why it is not established; nothing where it is
    spec: str = ""  # of a library's call: what it must compute
    measured: dict[str, float] = field(default_factory=dict)  # of it beside the oracle

    @property
    def is_established(self) -> bool:
        return not self.reason

    @property
    def record(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)

    def __str__(self) -> str:
        held = "attested" if self.kind == "library" else "established"
        told = f"not established: {self.reason}" if self.reason else held
        return f"{self.kind} {self.name}: {told}"
