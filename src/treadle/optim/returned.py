"""Gradients that a backward of the user's returned, by the parameters they are of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.base.errors import GradientError
from treadle.frontend.coerce import as_tensor
from treadle.frontend.tensor import Tensor
from treadle.optim.append import UpdatePlan


def named_gradients(plan: UpdatePlan, returned: Any) -> Mapping[str, Tensor]:
    """A user's gradients by parameter name, after checking number, names, shapes and dtypes."""
    names = list(plan.parameters)
    if isinstance(returned, Mapping):
        missing = [n for n in names if n not in returned]
        unexpected = [n for n in returned if n not in plan.parameters]
        if missing or unexpected:
            cause = f"gradients are missing for {missing} and unexpected for {unexpected}"
            raise GradientError("compile_manual_step", cause, "Return one per trained parameter.")
        found = {n: as_tensor(returned[n]) for n in names}
    else:
        parts = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        if len(parts) != len(names):
            cause = f"the backward returns {len(parts)} gradients for {len(names)} parameters"
            raise GradientError("compile_manual_step", cause, f"In order: {', '.join(names)}.")
        found = {n: as_tensor(g) for n, g in zip(names, parts, strict=True)}
    for name, g in found.items():
        if g.type != plan.parameters[name]:
            cause = f"the gradient of {name} is {g.type}, the parameter {plan.parameters[name]}"
            raise GradientError("compile_manual_step", cause, "They must be equal.")
    return found
