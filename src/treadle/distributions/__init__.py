"""Probability distributions with PyTorch's names: samples, densities, entropies, divergences."""

from treadle.distributions.compound import Independent as Independent
from treadle.distributions.compound import MixtureSameFamily as MixtureSameFamily
from treadle.distributions.compound import TransformedDistribution as TransformedDistribution
from treadle.distributions.continuous import Cauchy as Cauchy
from treadle.distributions.continuous import Exponential as Exponential
from treadle.distributions.continuous import Gumbel as Gumbel
from treadle.distributions.continuous import HalfCauchy as HalfCauchy
from treadle.distributions.continuous import HalfNormal as HalfNormal
from treadle.distributions.continuous import Laplace as Laplace
from treadle.distributions.continuous import Logistic as Logistic
from treadle.distributions.continuous import LogNormal as LogNormal
from treadle.distributions.continuous import Normal as Normal
from treadle.distributions.continuous import Pareto as Pareto
from treadle.distributions.continuous import Uniform as Uniform
from treadle.distributions.continuous import Weibull as Weibull
from treadle.distributions.discrete import Bernoulli as Bernoulli
from treadle.distributions.discrete import Binomial as Binomial
from treadle.distributions.discrete import Categorical as Categorical
from treadle.distributions.discrete import Geometric as Geometric
from treadle.distributions.discrete import Multinomial as Multinomial
from treadle.distributions.discrete import NegativeBinomial as NegativeBinomial
from treadle.distributions.discrete import OneHotCategorical as OneHotCategorical
from treadle.distributions.discrete import (
    OneHotCategoricalStraightThrough as OneHotCategoricalStraightThrough,
)
from treadle.distributions.discrete import Poisson as Poisson
from treadle.distributions.distribution import Distribution as Distribution
from treadle.distributions.divergence import kl_divergence as kl_divergence
from treadle.distributions.gamma import Beta as Beta
from treadle.distributions.gamma import Chi2 as Chi2
from treadle.distributions.gamma import Dirichlet as Dirichlet
from treadle.distributions.gamma import Gamma as Gamma
from treadle.distributions.gamma import InverseGamma as InverseGamma
from treadle.distributions.gamma import StudentT as StudentT
from treadle.distributions.multivariate import MultivariateNormal as MultivariateNormal
from treadle.distributions.relaxed import RelaxedBernoulli as RelaxedBernoulli
from treadle.distributions.relaxed import (
    RelaxedOneHotCategorical as RelaxedOneHotCategorical,
)
from treadle.distributions.transforms import AffineTransform as AffineTransform
from treadle.distributions.transforms import ComposeTransform as ComposeTransform
from treadle.distributions.transforms import ExpTransform as ExpTransform
from treadle.distributions.transforms import PowerTransform as PowerTransform
from treadle.distributions.transforms import SigmoidTransform as SigmoidTransform
from treadle.distributions.transforms import SoftplusTransform as SoftplusTransform
from treadle.distributions.transforms import TanhTransform as TanhTransform
from treadle.distributions.transforms import Transform as Transform
