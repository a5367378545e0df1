"""Writes docs/support.md: what is compared with what, on which device, from the tests' tables.

    python tools/support_page.py

A test compares the page with what this writes. It needs PyTorch and scikit-learn, as the tests do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "support.md"

INTRODUCTION = """\
# Support

Every public layer, function, loss and metric, and in how many configurations it is tested where.
This page is written by `tools/support_page.py` from the tables of the tests; a public name without
rows fails `tests/test_features.py`.

- *compared with*: whose values and gradients are the right ones, in float64;
- *oracle*: configurations in which the float64 oracle agrees with them;
- *CPU*: configurations compiled to machine code in float32 and compared, values alone and together
  with gradients; nothing is handed to another backend;
- *CUDA*: configurations scheduled for a GPU and printed as CUDA C++, on any machine. That says that
  no stage refuses. Numbers on a GPU are compared [elsewhere](cuda.md), op by op and on random
  programs, and on these configurations by `test_on_a_gpu`, which needs a GPU;
- *WebGPU*: configurations scheduled within the least limits of WebGPU and printed as WGSL, on any
  machine; those that are missing have values of 64 bits. Numbers are compared op by op on Mesa's
  lavapipe: see [WebGPU](webgpu.md).

Sizes fill the lanes of a vector and leave a rest. What is listed under *not claimed* is not there
or not compared; [not claimed](not-claimed.md) has what holds for everything."""

TITLES = {
    "nn": "Layers",
    "td": "Functions",
    "td.linalg": "Linear algebra",
    "td.fft": "Fourier transforms",
    "losses": "Losses",
    "metrics": "Metrics",
}
WITHOUT_ROWS = """\
## Without rows

Containers, random draws, transformations and the like are compared by tests of their own:"""

RANDOM = "which elements are drawn: other numbers than PyTorch's, of the same distribution"
SEQUENCES = "packed sequences (there is `lengths=`), projections, input without a batch axis"
SORTED = "speed on a GPU: the work grows with the square of the length"
TRIPLES = "`ceil_mode` together with indices"

# What a user of PyTorch may look for and not find, or what is not compared.
NOT_CLAIMED = {
    "nn.AlphaDropout": RANDOM,
    "nn.Dropout": RANDOM,
    "nn.Dropout1d": RANDOM,
    "nn.Dropout2d": RANDOM,
    "nn.Dropout3d": RANDOM,
    "nn.DropPath": RANDOM,
    "nn.DropBlock2d": RANDOM,
    "nn.FeatureAlphaDropout": RANDOM,
    "nn.RReLU": RANDOM,
    "nn.Embedding": "`max_norm`, `scale_grad_by_freq`, sparse gradients",
    "nn.EmbeddingBag": "bags by `offsets`: bags are rows of (N, L)",
    "nn.GRU": SEQUENCES,
    "nn.LSTM": SEQUENCES,
    "nn.RNN": SEQUENCES,
    "nn.MaxPool1d": TRIPLES,
    "nn.MaxPool2d": TRIPLES,
    "nn.MaxPool3d": TRIPLES,
    "nn.MultiheadAttention": "`add_bias_kv`, `add_zero_attn`, input without a batch axis",
    "nn.TransformerDecoder": "copies of one layer: a function makes each",
    "nn.TransformerEncoder": "copies of one layer: a function makes each",
    "nn.Upsample": "antialiasing",
    "td.argsort": SORTED,
    "td.sort": SORTED,
    "td.topk": SORTED,
    "td.attention": "that scores are never in memory: see [not claimed](not-claimed.md)",
    "td.interpolate": "antialiasing",
    "td.max_pool_with_indices": "`ceil_mode`",
    "td.nonzero": "a result as long as there are elements: its size is given",
    "td.scatter": "which of several written to one place wins: it is their mean",
    "td.segment_max": SORTED,
    "td.segment_min": SORTED,
    "losses.ctc": "targets in one row after the other, cuDNN's",
    "losses.linear_cross_entropy": "class weights together with smoothing",
}


# Configurations with float64 or int64, which WGSL has not: constant masks and edges of bins.
WIDE = {
    "metrics.ECE": 15,
    "metrics.MCE": 15,
    "nn.MultiHeadAttention": 4,
    "nn.MultiheadAttention": 1,
    "td.cast": 2,
}


def row(feature: Any) -> str:
    count = str(len(feature.rows()))
    narrow = len(feature.rows()) - WIDE.get(feature.title, 0)
    is_named = "." in feature.against
    cells = (
        f"`{feature.title}`",
        f"`{feature.against}`" if is_named else feature.against,
        str(feature.exact),
        count,
        count,
        str(narrow or "no"),
        NOT_CLAIMED.get(feature.title, ""),
    )
    return f"| {' | '.join(cells)} |"


def section(title: str, features: list[Any]) -> str:
    total = sum(len(f.rows()) for f in features)
    head = [
        f"## {title}",
        "",
        f"{len(features)} of them, in {total} configurations.",
        "",
        "| name | compared with | oracle | CPU | CUDA | WebGPU | not claimed |",
        "|---|---|---|---|---|---|---|",
    ]
    ordered = sorted(features, key=lambda f: f.name.lower())
    return "\n".join([*head, *map(row, ordered)])


def page(features: list[Any], tested: dict[str, str]) -> str:
    """The page of some features, and of what has tests instead of rows."""
    kinds = {f.kind: [] for f in features}
    for feature in features:
        kinds[feature.kind].append(feature)
    parts = [INTRODUCTION, *(section(TITLES.get(k, k), found) for k, found in kinds.items())]
    rows = [f"| `{name}` | `tests/{place}` |" for name, place in sorted(tested.items())]
    parts.append("\n".join([WITHOUT_ROWS, "", "| name | test |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    sys.path[:0] = [str(ROOT / "tests")]
    from features import FEATURES, TESTED

    PAGE.write_text(page(FEATURES, TESTED), encoding="utf-8")


if __name__ == "__main__":
    main()
