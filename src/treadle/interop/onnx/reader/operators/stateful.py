"""Layers with a state from one call to the next: linear attention and causal convolutions."""

from __future__ import annotations

from typing import Any

from treadle.base import dtypes
from treadle.frontend.coerce import as_tensor
from treadle.frontend.coerce import cast as cast_to
from treadle.frontend.control import scan
from treadle.frontend.functions import arithmetic as a
from treadle.frontend.functions import linear
from treadle.frontend.functions import shaping as s
from treadle.frontend.functions.activations import silu
from treadle.frontend.scopes import bind1
from treadle.frontend.tensor import Tensor
from treadle.interop.onnx.reader.calls import Call, Value, operator, rank_of
from treadle.ir import composites as c

RULES = ("linear", "gated", "delta", "gated_delta")


@operator("LinearAttention")
def _linear_attention(
    call: Call,
    q: Value,
    k: Value,
    v: Value,
    past: Value = None,
    decay: Value = None,
    beta: Value = None,
) -> list[Tensor]:
    """A state (B, H, d, m) that each step decays, corrects and reads."""
    rule = call.choice("update_rule", "gated_delta", RULES)
    is_gated, is_delta = rule.startswith("gated"), rule.endswith("delta")
    if is_gated == (decay is None) or is_delta == (beta is None):
        raise call.refuse(f"the operands are not those of the rule {rule!r}")
    query, shape = as_tensor(q), as_tensor(q).shape
    heads, shared = call.integer("q_num_heads"), call.integer("kv_num_heads")
    ranks = {rank_of(x) for x in (q, k, v, decay, beta) if x is not None}
    if ranks != {3} or shared < 1 or heads % shared:
        raise call.refuse(f"{heads} heads, {shared} of keys, and operands of {ranks} axes")
    dtype = dtypes.float64 if query.dtype is dtypes.float64 else dtypes.float32
    rows = _rows(call, query, heads, dtype)
    times, batch, _, width = rows.shape
    rows = s.reshape(rows, (times, batch, shared, heads // shared, width))
    keys, values = (_rows(call, x, shared, dtype) for x in (k, v))
    given: dict[str, Tensor] = {"q": rows, "k": keys, "v": values}
    if decay is not None:
        given["decay"] = _rows(call, decay, shared, dtype)
    if beta is not None:
        given["beta"] = _rows(call, beta, as_tensor(beta).shape[2], dtype)
    sizes = (batch, shared, keys.shape[3], values.shape[3])
    state = s.zeros(sizes, dtype) if past is None else cast_to(as_tensor(past), dtype)
    if state.shape != sizes:
        raise call.refuse(f"the state is {state.type}, and not {sizes}")
    last, found = scan(_attention_step, state, given)
    scale = call.real("scale", 0.0) or width**-0.5
    steps = s.moveaxis(found * scale, 0, 1)
    result = s.reshape(steps, (*shape[:2], heads * values.shape[3]))
    kept = query.dtype if past is None else as_tensor(past).dtype
    return [cast_to(result, query.dtype), cast_to(last, kept)]


def _rows(call: Call, x: Value, heads: int, dtype: dtypes.DType) -> Tensor:
    """(B, T, H · d) as (T, B, H, d)."""
    tensor = as_tensor(x)
    b, t, width = tensor.shape
    if heads < 1 or width % heads:
        raise call.refuse(f"{heads} heads of {tensor.type}")
    return cast_to(s.moveaxis(s.reshape(tensor, (b, t, heads, width // heads)), 1, 0), dtype)


def _attention_step(state: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    key, value = given["k"], given["v"]
    if "decay" in given:
        state = state * s.unsqueeze(a.exp(given["decay"]), -1)
    if "beta" in given:
        value = given["beta"] * (value - linear.einsum("bhdm,bhd->bhm", state, key))
    state = state + s.unsqueeze(key, -1) * s.unsqueeze(value, -2)
    return state, linear.einsum("bhgd,bhdm->bhgm", given["q"], state)


@operator("CausalConvWithState")
def _causal_convolution(
    call: Call, x: Value, w: Value, bias: Value = None, past: Value = None
) -> list[Any]:
    """A convolution of each channel over the past; the state is the end of what it has read."""
    tensor, weight = as_tensor(x), as_tensor(w)
    channels, reach = weight.shape[0], weight.shape[-1] - 1
    if tensor.ndim != 3 or weight.shape[1:-1] != (1,) or tensor.shape[1] != channels or reach < 0:
        raise call.refuse(f"x is {tensor.type}, the weight {weight.type}")
    before = (tensor.shape[0], channels, reach)
    state = s.zeros(before, tensor.dtype) if past is None else as_tensor(past)
    if state.shape != before:
        raise call.refuse(f"the state is {state.type}, and not {before}")
    whole = s.concat([state, tensor], 2)
    found = bind1(c.CONV, c.Conv((1,), ((0, 0),), (1,), channels), whole, weight)
    if bias is not None:
        found = found + s.unsqueeze(as_tensor(bias), -1)
    if call.choice("activation", "none", ("none", "silu", "swish")) != "none":
        found = silu(found)
    return [found, s.slice_along(whole, 2, whole.shape[2] - reach, whole.shape[2])]
