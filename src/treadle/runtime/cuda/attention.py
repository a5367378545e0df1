"""Attention through cuDNN: forward and backward on tensors where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.kernel.launch import LibraryLaunch
from treadle.runtime.cuda.conv import NoLibraryCallError
from treadle.runtime.cuda.dnn import (
    DnnCall,
    data_types,
    empty_graph,
    operands_of,
    set_results,
)

# Names of the operands, in the order of the composites. A bias is the last, if there is one.
FORWARD = ("q", "k", "v", "bias")
BACKWARD = ("dO", "o", "stats", "q", "k", "v", "bias")
GRADIENTS = 3  # of q, k and v; that of a bias is described as an operand is


def planned_attention(call: LibraryLaunch, is_deterministic: bool) -> DnnCall:
    """One shape of attention with the plan that cuDNN likes best."""
    try:
        return DnnCall(call, _planned(call, is_deterministic))
    except Exception as error:  # the frontend raises errors of its own
        raise NoLibraryCallError(call, str(error)) from error


def _planned(call: LibraryLaunch, is_deterministic: bool) -> Any:
    import cudnn

    graph = empty_graph(call)
    numbers = dict(call.numbers)
    options = {"attn_scale": numbers["scale"], "use_causal_mask": bool(numbers["causal"])}
    names = FORWARD if call.name == "attention" else BACKWARD
    options |= operands_of(graph, _spread(call, names), names[: len(call.operands)])
    if names is FORWARD:
        results = graph.sdpa(name=call.name, generate_stats=True, **options)
    else:
        options["use_deterministic_algorithm"] = is_deterministic
        if len(call.results) > GRADIENTS:
            options |= _bias_gradient(graph, call)
        results = graph.sdpa_backward(name=call.name, **options)
    set_results(replace(call, results=call.results[: len(results)]), results)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph


def _spread(call: LibraryLaunch, names: Sequence[str]) -> LibraryLaunch:
    """The call with a bias that has a row for each query, if all of them are the same one.

    cuDNN 9.19 takes a bias of one row, and gives wrong gradients for it.
    """
    if len(call.operands) < len(names):
        return call
    *others, bias = call.operands
    (b, heads, _, keys), steps = bias.shape, bias.strides
    queries = call.operands[names.index("q")].shape[2]
    same = queries != bias.shape[2]
    strides = (*steps[:2], 0, steps[3]) if same else steps
    spread = replace(bias, shape=(b, heads, queries, keys), strides=strides)
    return replace(call, operands=(*others, spread))


def _bias_gradient(graph: Any, call: LibraryLaunch) -> dict[str, Any]:
    """What the gradient of the bias is written to; its number is that of a result."""
    result = call.results[GRADIENTS]
    dims, steps, dtype = list(result.shape), list(result.strides), data_types()[result.dtype]
    made = graph.tensor(name="dBias", dim=dims, stride=steps, data_type=dtype)
    return {"dBias": made.set_uid(len(call.operands) + GRADIENTS + 1)}
