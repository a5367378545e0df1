"""Whether a small or a large value of a metric is good, by the metric's name."""

from __future__ import annotations

import re
from typing import Literal

from treadle.base.errors import ArgumentError

Direction = Literal["min", "max"]
DIRECTIONS: tuple[Direction, ...] = ("min", "max")

_KNOWN: dict[str, Direction] = {
    **dict.fromkeys(
        """
        loss error errors err perplexity ppl mae mse rmse mape smape rmsle msle nll bce
        crossentropy logloss ece mce brier wer cer fid
        """.split(),
        "min",
    ),
    **dict.fromkeys(
        """
        accuracy acc f1 precision recall sensitivity specificity auc auroc auprc ap map iou miou
        jaccard dice ndcg mrr mcc matthews kappa r2 bleu rouge chrf psnr ssim reward return
        """.split(),
        "max",
    ),
}
# Words that say of what, or averaged how: they do not change what is good.
_QUALIFIERS = frozenset(
    """
    train training val valid validation test dev eval macro micro weighted binary balanced top k at
    mean avg average total rate score corrcoef coefficient roc pr ovr ovo ema log squared absolute
    root class word token cohen
    """.split()
)


def direction_of(name: str) -> Direction | None:
    """Return "min" or "max" for a known name such as "val/accuracy", None for others."""
    own = name.rpartition("/")[2].lower().replace("cross_entropy", "crossentropy")
    found: set[Direction] = set()
    for word in re.findall(r"[a-z0-9]+", own):
        stem = word if word in _KNOWN else word.rstrip("0123456789")  # "f1", "top5"
        if stem in _KNOWN:
            found.add(_KNOWN[stem])
        elif stem and stem not in _QUALIFIERS:
            return None
    return found.pop() if len(found) == 1 else None


def checked_direction(operation: str, name: str, mode: str | None) -> Direction:
    """The mode, or the direction of a known name where none is given. Any other name raises."""
    if mode is None:
        found = direction_of(name)
        if found is not None:
            return found
        cause = f"nothing says whether a small or a large {name!r} is good"
        raise ArgumentError(operation, cause, 'Pass mode="min" or mode="max".')
    for direction in DIRECTIONS:
        if mode == direction:
            return direction
    raise ArgumentError(operation, f"mode = {mode!r}", 'A mode is "min" or "max".')
