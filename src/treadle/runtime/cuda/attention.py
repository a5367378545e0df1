"""Attention through cuDNN: forward and backward on tensors where they lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treadle.kernel.launch import LibraryLaunch
from treadle.runtime.cuda.conv import NoLibraryCallError
from treadle.runtime.cuda.dnn import DnnCall, empty_graph, operands_of, set_results

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
    options |= operands_of(graph, call, names[: len(call.operands)])
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


def _bias_gradient(graph: Any, call: LibraryLaunch) -> dict[str, Any]:
    """What the gradient of the bias is written to; its number is that of a result."""
    alone = replace(call, operands=call.results[GRADIENTS:])
    (made,) = operands_of(graph, alone, ["dBias"]).values()
    return {"dBias": made.set_uid(len(call.operands) + GRADIENTS + 1)}
