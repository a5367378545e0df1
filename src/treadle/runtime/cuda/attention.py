"""Attention through cuDNN: forward and backward on tensors where they lie."""

from __future__ import annotations

from treadle.kernel.launch import LibraryLaunch
from treadle.runtime.cuda.dnn import DnnCall, empty_graph, operands_of, set_results

# Names of the operands, in the order of the composites.
FORWARD = ("q", "k", "v")
BACKWARD = ("dO", "o", "stats", "q", "k", "v")


def planned_attention(call: LibraryLaunch, is_deterministic: bool) -> DnnCall:
    """One shape of attention with the plan that cuDNN likes best."""
    import cudnn

    graph = empty_graph(call)
    numbers = dict(call.numbers)
    options = {"attn_scale": numbers["scale"], "use_causal_mask": bool(numbers["causal"])}
    if len(call.operands) == len(FORWARD):
        operands = operands_of(graph, call, FORWARD)
        results = graph.sdpa(name="attention", **operands, generate_stats=True, **options)
    else:
        operands = operands_of(graph, call, BACKWARD)
        options["use_deterministic_algorithm"] = is_deterministic
        results = graph.sdpa_backward(name="attention_grad", **operands, **options)
    set_results(call, results)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return DnnCall(call, graph)
