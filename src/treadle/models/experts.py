"""A mixture of experts as Mixtral's: the greatest of a router's scores choose who computes."""

from __future__ import annotations

from collections.abc import Callable

from treadle.base import dtypes
from treadle.base.errors import ArgumentError
from treadle.base.numbers import check_whole
from treadle.frontend.coerce import cast
from treadle.frontend.functions.activations import softmax
from treadle.frontend.functions.indexing import one_hot
from treadle.frontend.functions.reductions import sum as sum_over
from treadle.frontend.functions.reductions import topk
from treadle.frontend.functions.shaping import unsqueeze
from treadle.frontend.tensor import Operand, Tensor
from treadle.nn.containers import ModuleList
from treadle.nn.layers import Linear
from treadle.nn.module import Module

Activation = Callable[[Operand], Tensor]


class Expert(Module):
    """w2(act(w1 x) · w3 x): (…, width) → the same."""

    def __init__(self, width: int, hidden: int, act: Activation):
        self.w1, self.w3 = Linear(width, hidden, False), Linear(width, hidden, False)
        self.w2 = Linear(hidden, width, False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(self.act(self.w1(x)) * self.w3(x))
        return result


class SparseMixture(Module):
    """The weighted sum of the `chosen` experts that a router scores highest: (…, width) → the same.

    Shapes are static, so that every expert computes every token, and the others' weights are 0.
    """

    def __init__(self, width: int, hidden: int, count: int, chosen: int, act: Activation):
        check_whole("SparseMixture", "count", count)
        if check_whole("SparseMixture", "chosen", chosen) > count:
            raise ArgumentError("SparseMixture", f"{chosen} of {count} experts", "Choose fewer.")
        self.chosen = chosen
        self.gate = Linear(width, count, bias=False)
        self.experts = ModuleList(Expert(width, hidden, act) for _ in range(count))

    def weights(self, x: Tensor) -> Tensor:
        """(…, experts): those of the chosen sum to 1."""
        scores = softmax(cast(self.gate(x), dtypes.float32))
        greatest, which = topk(scores, self.chosen)
        shares = greatest / sum_over(greatest, -1, keepdims=True)
        each = one_hot(which, scores.shape[-1]) * unsqueeze(shares, -1)  # (…, chosen, experts)
        return cast(sum_over(each, -2), x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights(x)
        parts = [e(x) * weights[..., i : i + 1] for i, e in enumerate(self.experts)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total
