"""Losses. PyTorch's definitions and reductions; a mean is a `td.Mean`, which knows its weight."""

from treadle.losses.classification import bce as bce
from treadle.losses.classification import bce_with_logits as bce_with_logits
from treadle.losses.classification import cross_entropy as cross_entropy
from treadle.losses.classification import kl_div as kl_div
from treadle.losses.classification import nll as nll
from treadle.losses.heads import linear_cross_entropy as linear_cross_entropy
from treadle.losses.regression import huber as huber
from treadle.losses.regression import l1 as l1
from treadle.losses.regression import mse as mse
