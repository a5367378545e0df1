"""Optimizers as pairs of pure, traced functions, and learning-rate schedules."""

import typing as _typing

from treadle.base import elsewhere as _elsewhere
from treadle.base.numbers import Domain as Domain
from treadle.optim.adaptive import adabelief as adabelief
from treadle.optim.adaptive import adamax as adamax
from treadle.optim.adaptive import adamp as adamp
from treadle.optim.adaptive import ademamix as ademamix
from treadle.optim.adaptive import laprop as laprop
from treadle.optim.adaptive import lion as lion
from treadle.optim.adaptive import nadam as nadam
from treadle.optim.adaptive import radam as radam
from treadle.optim.averaging import ema as ema
from treadle.optim.averaging import lookahead as lookahead
from treadle.optim.averaging import schedule_free_adamw as schedule_free_adamw
from treadle.optim.averaging import swa as swa
from treadle.optim.clipping import clip_adaptively as clip_adaptively
from treadle.optim.clipping import clip_by_global_norm as clip_by_global_norm
from treadle.optim.clipping import clip_by_norm as clip_by_norm
from treadle.optim.clipping import clip_by_percentile as clip_by_percentile
from treadle.optim.clipping import clip_by_value as clip_by_value
from treadle.optim.cycles import cosine_restarts as cosine_restarts
from treadle.optim.cycles import cyclic as cyclic
from treadle.optim.cycles import one_cycle as one_cycle
from treadle.optim.cycles import triangular as triangular
from treadle.optim.factored import adafactor as adafactor
from treadle.optim.gradients import centralize_gradients as centralize_gradients
from treadle.optim.gradients import normalize_gradients as normalize_gradients
from treadle.optim.grouping import freeze as freeze
from treadle.optim.grouping import group as group
from treadle.optim.grouping import groups as groups
from treadle.optim.grouping import only as only
from treadle.optim.kronecker import shampoo as shampoo
from treadle.optim.kronecker import soap as soap
from treadle.optim.layerwise import lamb as lamb
from treadle.optim.layerwise import lars as lars
from treadle.optim.matrix import galore as galore
from treadle.optim.matrix import muon as muon
from treadle.optim.multitask import gradnorm as gradnorm
from treadle.optim.multitask import pcgrad as pcgrad
from treadle.optim.optimizer import Context as Context
from treadle.optim.optimizer import Optimizer as Optimizer
from treadle.optim.optimizer import Transform as Transform
from treadle.optim.optimizer import chain as chain
from treadle.optim.parameter_free import prodigy as prodigy
from treadle.optim.penalties import elastic_net_penalty as elastic_net_penalty
from treadle.optim.penalties import group_lasso_penalty as group_lasso_penalty
from treadle.optim.penalties import l1_penalty as l1_penalty
from treadle.optim.penalties import l2_penalty as l2_penalty
from treadle.optim.penalties import max_norm as max_norm
from treadle.optim.penalties import orthogonal_penalty as orthogonal_penalty
from treadle.optim.plateau import ReduceOnPlateau as ReduceOnPlateau
from treadle.optim.quasi_newton import lbfgs as lbfgs
from treadle.optim.range_test import RangeTest as RangeTest
from treadle.optim.range_test import find_learning_rate as find_learning_rate
from treadle.optim.schedules import Schedule as Schedule
from treadle.optim.schedules import constant as constant
from treadle.optim.schedules import cosine as cosine
from treadle.optim.schedules import exponential as exponential
from treadle.optim.schedules import join as join
from treadle.optim.schedules import linear as linear
from treadle.optim.schedules import multi_step as multi_step
from treadle.optim.schedules import noam as noam
from treadle.optim.schedules import polynomial as polynomial
from treadle.optim.schedules import schedule as schedule
from treadle.optim.schedules import step_decay as step_decay
from treadle.optim.schedules import warmup_cosine as warmup_cosine
from treadle.optim.second_order import sam as sam
from treadle.optim.second_order import sophia as sophia
from treadle.optim.standard import adadelta as adadelta
from treadle.optim.standard import adagrad as adagrad
from treadle.optim.standard import adam as adam
from treadle.optim.standard import adamw as adamw
from treadle.optim.standard import asgd as asgd
from treadle.optim.standard import rmsprop as rmsprop
from treadle.optim.standard import rprop as rprop
from treadle.optim.standard import sgd as sgd

if not _typing.TYPE_CHECKING:  # mypy would take every name for one that is there

    def __getattr__(name: str) -> object:
        raise _elsewhere.unknown("optim", name, _elsewhere.OPTIM, globals())
