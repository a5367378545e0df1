"""Losses. PyTorch's definitions and reductions; a mean is a `td.Mean`, which knows its weight."""

import typing as _typing

from treadle.base import elsewhere as _elsewhere
from treadle.losses.classification import bce as bce
from treadle.losses.classification import bce_with_logits as bce_with_logits
from treadle.losses.classification import cross_entropy as cross_entropy
from treadle.losses.classification import kl_div as kl_div
from treadle.losses.classification import nll as nll
from treadle.losses.combined import uncertainty as uncertainty
from treadle.losses.combined import weighted as weighted
from treadle.losses.distributions import attention_distillation as attention_distillation
from treadle.losses.distributions import ctc as ctc
from treadle.losses.distributions import distillation as distillation
from treadle.losses.distributions import entropy as entropy
from treadle.losses.distributions import feature_distillation as feature_distillation
from treadle.losses.distributions import gaussian_nll as gaussian_nll
from treadle.losses.distributions import log_cosh as log_cosh
from treadle.losses.distributions import poisson_nll as poisson_nll
from treadle.losses.distributions import smooth_l1 as smooth_l1
from treadle.losses.distributions import soft_target_cross_entropy as soft_target_cross_entropy
from treadle.losses.heads import linear_cross_entropy as linear_cross_entropy
from treadle.losses.logic import Logic as Logic
from treadle.losses.logic import at_most as at_most
from treadle.losses.logic import mean_truth as mean_truth
from treadle.losses.logic import satisfaction as satisfaction
from treadle.losses.logic import violation as violation
from treadle.losses.margins import contrastive as contrastive
from treadle.losses.margins import cosine_embedding as cosine_embedding
from treadle.losses.margins import hinge as hinge
from treadle.losses.margins import hinge_embedding as hinge_embedding
from treadle.losses.margins import info_nce as info_nce
from treadle.losses.margins import margin_ranking as margin_ranking
from treadle.losses.margins import multi_margin as multi_margin
from treadle.losses.margins import multilabel_margin as multilabel_margin
from treadle.losses.margins import multilabel_soft_margin as multilabel_soft_margin
from treadle.losses.margins import nt_xent as nt_xent
from treadle.losses.margins import soft_margin as soft_margin
from treadle.losses.margins import supervised_contrastive as supervised_contrastive
from treadle.losses.margins import triplet_margin as triplet_margin
from treadle.losses.margins import triplet_with_distance as triplet_with_distance
from treadle.losses.regions import box_iou as box_iou
from treadle.losses.regions import dice as dice
from treadle.losses.regions import diou as diou
from treadle.losses.regions import focal as focal
from treadle.losses.regions import giou as giou
from treadle.losses.regions import lovasz_hinge as lovasz_hinge
from treadle.losses.regions import lovasz_softmax as lovasz_softmax
from treadle.losses.regions import poly as poly
from treadle.losses.regions import sigmoid_focal as sigmoid_focal
from treadle.losses.regions import tversky as tversky
from treadle.losses.regression import huber as huber
from treadle.losses.regression import l1 as l1
from treadle.losses.regression import mse as mse

if not _typing.TYPE_CHECKING:  # mypy would take every name for one that is there

    def __getattr__(name: str) -> object:
        raise _elsewhere.unknown("losses", name, {}, globals())
