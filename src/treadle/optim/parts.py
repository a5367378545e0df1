"""Parts of a loss that were named: their values in a step, and each as a loss of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from treadle.base.errors import GradientError
from treadle.frontend.functions.arithmetic import mul
from treadle.frontend.functions.shaping import ones
from treadle.frontend.scopes import Trace, isolated_tracing
from treadle.frontend.tensor import Tensor
from treadle.frontend.tracing import PART
from treadle.ir.graph import Graph, Output, OutputKind
from treadle.ir.rewrite import inline_into, remove_dead_code


def parts_among(captures: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parts of the loss by name, as `losses.weighted` left them."""
    return {n[len(PART) :]: t for n, t in captures.items() if n.startswith(PART)}


def loss_of_part(loss: Graph, name: str, scale: Callable[[Trace], Tensor] | None) -> Graph:
    """A loss of one part, with results as the whole has them: scaled, total and weight."""
    known = {o.name: i for i, o in enumerate(loss.outputs) if o.kind is OutputKind.CAPTURE}
    if PART + name not in known:
        found = ", ".join(n[len(PART) :] for n in known if n.startswith(PART)) or "none"
        raise GradientError(
            "grad_of_part", f"the loss has no part {name!r}", f"There are: {found}."
        )
    with isolated_tracing(f"{loss.name}.{name}") as trace:
        total = trace.tensor(inline_into(trace.builder, loss, {})[known[PART + name]])
        scaled = total if scale is None else mul(total, scale(trace))
        results = (scaled, total, ones((), total.dtype))
        outputs = [Output(OutputKind.RESULT, str(i), t.handle) for i, t in enumerate(results)]
        return remove_dead_code(trace.finish_outputs(outputs))
