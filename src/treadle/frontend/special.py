"""Special functions by the names that torch.special has for them: all are functions of `td`."""

from treadle.frontend.functions.activations import log_softmax as log_softmax
from treadle.frontend.functions.activations import sigmoid as expit
from treadle.frontend.functions.activations import softmax as softmax
from treadle.frontend.functions.arithmetic import erf as erf
from treadle.frontend.functions.arithmetic import expm1 as expm1
from treadle.frontend.functions.arithmetic import log1p as log1p
from treadle.frontend.functions.arithmetic import round as round
from treadle.frontend.functions.gamma import digamma as digamma
from treadle.frontend.functions.gamma import digamma as psi
from treadle.frontend.functions.gamma import lgamma as gammaln
from treadle.frontend.functions.gamma import polygamma as polygamma
from treadle.frontend.functions.incomplete_gamma import igamma as gammainc
from treadle.frontend.functions.incomplete_gamma import igammac as gammaincc
from treadle.frontend.functions.reductions import logsumexp as logsumexp
from treadle.frontend.functions.special import entr as entr
from treadle.frontend.functions.special import erfc as erfc
from treadle.frontend.functions.special import erfinv as erfinv
from treadle.frontend.functions.special import log_ndtr as log_ndtr
from treadle.frontend.functions.special import logit as logit
from treadle.frontend.functions.special import ndtr as ndtr
from treadle.frontend.functions.special import xlogy as xlogy

__all__ = [
    "digamma", "entr", "erf", "erfc", "erfinv", "expit", "expm1", "gammainc", "gammaincc",
    "gammaln", "log1p",
    "log_ndtr", "log_softmax", "logit", "logsumexp", "ndtr", "polygamma", "psi", "round",
    "softmax", "xlogy",
]  # fmt: skip
