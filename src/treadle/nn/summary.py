"""A table of what is in a model."""

from __future__ import annotations

from treadle.nn.module import Module
from treadle.nn.tracing import Values, as_module


def summary(model: object) -> str:
    """Modules, parameters with their shapes, and counts, as text."""
    module = as_module(model)
    rows = [("parameter", "shape", "count", "")]
    total = trained = 0
    for name, p in module.named_parameters():
        total += p.type.size
        trained += p.type.size if p.requires_grad else 0
        rows.append((name, str(p.shape), f"{p.type.size:,}", "" if p.requires_grad else "frozen"))
    for name, s in module.named_states():
        rows.append((name, str(s.shape), f"{s.type.size:,}", "state"))
    widths = [max(len(r[i]) for r in rows) for i in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {count:>{widths[2]}}  {note}".rstrip()
        for name, shape, count, note in rows
    ]
    lines.insert(0, _outline(module))
    lines.append(f"{total:,} parameters, {trained:,} trained")
    return "\n".join(lines)


def _outline(module: Module) -> str:
    """One line a module, under the module it is in and named by its path there."""
    lines = ["values" if isinstance(module, Values) else type(module).__name__]
    depths = {"": 0}
    for path, part in module.named_modules():
        if path:
            above = max((p for p in depths if path.startswith(p and f"{p}.")), key=len)
            depths[path] = depths[above] + 1
            label = path.removeprefix(above).removeprefix(".")
            lines.append(f"{'  ' * depths[path]}{label}: {type(part).__name__}")
    return "\n".join(lines)
