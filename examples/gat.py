"""A graph attention network: who belongs to which group, from features and from who knows whom.

    python examples/gat.py

The graph is made up: 600 people in four groups, friends mostly inside their own, features that say
little. Scores of edges become weights by a softmax over the edges that arrive at a person
(`td.segment_softmax`), and messages are added up there (`td.segment_sum`). A network that
sees the features alone is what it is compared with.
"""

import numpy as np

import treadle as td
from treadle import losses, nn, optim

GROUPS, FEATURES = 4, 16


class GATLayer(nn.Module):
    """Attention over edges: `forward(x, source, target)`, heads side by side."""

    def __init__(self, inputs: int, outputs: int, heads: int):
        first = nn.init.xavier_uniform()
        self.heads, self.outputs = heads, outputs
        self.project = nn.Linear(inputs, heads * outputs, bias=False)
        self.to_source = nn.Parameter((heads, outputs), first)
        self.to_target = nn.Parameter((heads, outputs), first)
        self.bias = nn.Parameter((heads * outputs,))

    def forward(self, x, source, target):
        count = x.shape[0]
        h = self.project(x).reshape(count, self.heads, self.outputs)  # (N, H, D)
        a, b = (h * self.to_source).sum(-1), (h * self.to_target).sum(-1)  # (N, H)
        scores = td.leaky_relu(a[source] + b[target], 0.2)  # (E, H)
        weights = td.segment_softmax(scores, target, count)
        mixed = td.segment_sum(weights.unsqueeze(-1) * h[source], target, count)
        return mixed.reshape(count, -1) + self.bias


class GAT(nn.Module):
    def __init__(self, hidden: int = 8, heads: int = 4):
        self.first = GATLayer(FEATURES, hidden, heads)
        self.second = GATLayer(hidden * heads, GROUPS, 1)

    def forward(self, x, source, target):
        return self.second(td.elu(self.first(x, source, target)), source, target)


class MLP(nn.Module):
    """The same without a graph."""

    def __init__(self, hidden: int = 32):
        self.first, self.second = nn.Linear(FEATURES, hidden), nn.Linear(hidden, GROUPS)

    def forward(self, x, source, target):
        return self.second(td.elu(self.first(x)))


def loss(model, graph):
    """Over the people whose group is known; the others are what it is judged by."""
    scores = model(graph["x"], graph["source"], graph["target"])
    known = graph["known"]
    each = losses.cross_entropy(scores, graph["y"], reduction="none")
    is_right = (scores.argmax(-1) == graph["y"]).astype(td.float32)
    td.metric("accuracy", (is_right * (1 - known)).sum() / (1 - known).sum())
    return (each * known).sum() / known.sum()


def society(people: int = 600, seed: int = 0, known: float = 0.1):
    """Features, edges in both directions and from everyone to themselves, groups."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, GROUPS, people).astype(np.int32)
    centres = rng.normal(size=(GROUPS, FEATURES))
    x = 0.4 * centres[y] + rng.normal(size=(people, FEATURES))
    chance = np.where(y[:, None] == y, 16.0, 2.0) / people
    one, other = np.nonzero(np.triu(rng.random((people, people)) < chance, 1))
    itself = np.arange(people)
    return {
        "x": x.astype(np.float32),
        "y": y,
        "source": np.concatenate([one, other, itself]).astype(np.int32),
        "target": np.concatenate([other, one, itself]).astype(np.int32),
        "known": (rng.random(people) < known).astype(np.float32),
    }


def fit(model, graph, steps: int, lr: float):
    optimizer = optim.adam(lr, weight_decay=5e-3)
    step = td.compile_step(model, loss, optimizer, graph, device="cpu")
    for i in range(1, steps + 1):
        out = step(graph)
        if i % 50 == 0 or i == steps:
            told = out.metrics["accuracy"]
            print(
                f"{type(model).__name__}, step {i}: loss {out.loss:.3f}, {told:.1%} of the others"
            )
    return step.evaluate(graph).metrics["accuracy"]


def train(steps: int = 150, lr: float = 1e-2, people: int = 600, seed: int = 0):
    graph = society(people, seed)
    print(f"{people} people, {len(graph['source'])} edges, {graph['known'].sum():.0f} groups known")
    alone = fit(MLP(), graph, steps, lr)
    together = fit(GAT(), graph, steps, lr)
    print(f"groups told right: {alone:.1%} by features alone, {together:.1%} with the graph")
    return alone, together


if __name__ == "__main__":
    train()
