"""Optimizers as pairs of pure, traced functions, and learning-rate schedules."""

from treadle.optim.clipping import clip_by_global_norm as clip_by_global_norm
from treadle.optim.optimizer import Context as Context
from treadle.optim.optimizer import Optimizer as Optimizer
from treadle.optim.optimizer import Transform as Transform
from treadle.optim.optimizer import chain as chain
from treadle.optim.optimizer import freeze as freeze
from treadle.optim.optimizer import groups as groups
from treadle.optim.optimizer import only as only
from treadle.optim.schedules import Schedule as Schedule
from treadle.optim.schedules import constant as constant
from treadle.optim.schedules import cosine as cosine
from treadle.optim.schedules import linear as linear
from treadle.optim.schedules import warmup_cosine as warmup_cosine
from treadle.optim.standard import adam as adam
from treadle.optim.standard import adamw as adamw
from treadle.optim.standard import sgd as sgd
