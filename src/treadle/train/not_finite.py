"""The error of a run or checkpoint whose numbers are no longer finite."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from treadle.base.errors import NotFiniteError

SHOWN = 3  # names that a message lists
ADVICE = (
    "Look for NaN and infinities in the data, compile with CompileOptions(detect_anomaly=True) to "
    "see where it comes from, or lower the learning rate."
)


class Saved(Protocol):
    """A checkpoint, of which the path is said."""

    @property
    def path(self) -> Path: ...


def not_finite_error(
    operation: str,
    names: tuple[str, ...],
    step: int,
    last: Saved | None,
    loss: float | None = None,
    place: str = "",
) -> NotFiniteError:
    """Of values after an update, or of a loss where there are no names; and what is left."""
    saved = "There is no checkpoint." if last is None else f"The last good one is {last.path}."
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    listed = ", ".join(names[:SHOWN]) + more
    values = f"what step {step}{place} left is not finite: {listed}"
    return NotFiniteError(
        operation,
        values if names else f"the loss is {loss} at step {step}{place}",
        f"{saved} {ADVICE}",
        step=step,
        loss=loss,
        names=names,
        checkpoint=None if last is None else last.path,
    )
