"""Graphs: attention over edges, and means over neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np

from families.entry import Arrays, Entry, classes, floats


def gat(
    s: Any, features: int, heads: int, width: int, count: int, nodes: int, **others: int
) -> Any:
    """A graph attention network: each node looks at its neighbours by a softmax over its edges."""
    nn = s.nn

    class Layer(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.outputs = outputs
            self.project = nn.Linear(inputs, heads * outputs, bias=False)
            self.source, self.target = (s.parameter(heads, outputs, spread=0.3) for _ in range(2))

        def forward(self, x: Any, sources: Any, targets: Any) -> Any:
            h = self.project(x).reshape(nodes, heads, self.outputs)
            of_source, of_target = ((h * a).sum(-1) for a in (self.source, self.target))
            scores = s.take(of_source, sources, 0) + s.take(of_target, targets, 0)
            weights = s.segment_softmax(s.leaky_relu(scores, 0.2), targets, nodes)
            messages = s.take(h, sources, 0) * weights[..., None]  # (edges, heads, outputs)
            return s.segment_sum(messages, targets, nodes)

    class GAT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Layer(features, width), Layer(heads * width, count)

        def forward(self, batch: Any) -> Any:
            edges = batch["sources"], batch["targets"]
            x = s.relu(self.one(batch["x"], *edges).reshape(nodes, heads * width))
            return s.cross_entropy(self.two(x, *edges).mean(1), batch["y"])

    return GAT()


def sage(s: Any, features: int, width: int, count: int, nodes: int, **others: int) -> Any:
    """GraphSAGE: a node's own features beside the mean of its neighbours'."""
    nn = s.nn

    class Layer(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

        def forward(self, x: Any, sources: Any, targets: Any) -> Any:
            means = s.segment_mean(s.take(x, sources, 0), targets, nodes)
            return self.own(x) + self.others(means)

    class SAGE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Layer(features, width), Layer(width, count)

        def forward(self, batch: Any) -> Any:
            edges = batch["sources"], batch["targets"]
            x = s.relu(self.one(batch["x"], *edges))
            return s.cross_entropy(self.two(x, *edges), batch["y"])

    return SAGE()


def graph(
    rng: np.random.Generator, nodes: int, degree: int, features: int, count: int, **others: int
) -> Arrays:
    """Random edges, and one from each node to itself."""
    sources = classes(rng, nodes, nodes * degree)
    targets = classes(rng, nodes, nodes * degree)
    own = np.arange(nodes, dtype=np.int32)
    return {
        "x": floats(rng, nodes, features),
        "y": classes(rng, count, nodes),
        "sources": np.concatenate([sources, own]),
        "targets": np.concatenate([targets, own]),
    }


ENTRIES = [
    Entry(
        "gat",
        "graph attention, segment softmax",
        gat,
        graph,
        {"nodes": 2000, "degree": 8, "features": 128, "heads": 8, "width": 8, "count": 7},
        {"nodes": 50000, "degree": 16, "features": 256, "heads": 8, "width": 32, "count": 40},
    ),
    Entry(
        "sage",
        "GraphSAGE, means of neighbours",
        sage,
        graph,
        {"nodes": 2000, "degree": 8, "features": 128, "width": 64, "count": 7},
        {"nodes": 50000, "degree": 16, "features": 256, "width": 256, "count": 40},
    ),
]
