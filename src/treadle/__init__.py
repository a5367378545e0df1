"""Treadle: a neural network's whole training step as one checked native program."""

import importlib as _importlib
import typing as _typing

import treadle.base.elsewhere as _elsewhere

# Fills the rule tables, which gives ops their meaning and gradients.
from treadle import fft as fft
from treadle import linalg as linalg
from treadle import losses as losses
from treadle import nn as nn
from treadle import optim as optim
from treadle import tables as tables
from treadle.autodiff.transforms import custom_vjp as custom_vjp
from treadle.autodiff.transforms import grad as grad
from treadle.autodiff.transforms import jvp as jvp
from treadle.autodiff.transforms import value_and_grad as value_and_grad
from treadle.autodiff.transforms import vjp as vjp
from treadle.base.dtypes import bfloat16 as bfloat16
from treadle.base.dtypes import bool_ as bool_
from treadle.base.dtypes import float16 as float16
from treadle.base.dtypes import float32 as float32
from treadle.base.dtypes import float64 as float64
from treadle.base.dtypes import int8 as int8
from treadle.base.dtypes import int32 as int32
from treadle.base.dtypes import int64 as int64
from treadle.base.dtypes import uint8 as uint8
from treadle.base.dtypes import uint32 as uint32
from treadle.base.errors import AccumulatorFullError as AccumulatorFullError
from treadle.base.errors import ArgumentError as ArgumentError
from treadle.base.errors import AxisError as AxisError
from treadle.base.errors import BatchError as BatchError
from treadle.base.errors import CacheWarning as CacheWarning
from treadle.base.errors import CallbackError as CallbackError
from treadle.base.errors import CheckpointError as CheckpointError
from treadle.base.errors import CheckpointWarning as CheckpointWarning
from treadle.base.errors import CopyError as CopyError
from treadle.base.errors import DeviceError as DeviceError
from treadle.base.errors import DistributedError as DistributedError
from treadle.base.errors import DTypeError as DTypeError
from treadle.base.errors import GradientError as GradientError
from treadle.base.errors import GradientShapeError as GradientShapeError
from treadle.base.errors import GraphError as GraphError
from treadle.base.errors import IndexRangeError as IndexRangeError
from treadle.base.errors import LoadError as LoadError
from treadle.base.errors import NameTakenError as NameTakenError
from treadle.base.errors import NotFiniteError as NotFiniteError
from treadle.base.errors import NothingAccumulatedError as NothingAccumulatedError
from treadle.base.errors import OutOfMemoryError as OutOfMemoryError
from treadle.base.errors import ParseError as ParseError
from treadle.base.errors import SaveError as SaveError
from treadle.base.errors import ShapeError as ShapeError
from treadle.base.errors import TraceError as TraceError
from treadle.base.errors import TreadleError as TreadleError
from treadle.base.errors import UnknownNameError as UnknownNameError
from treadle.base.errors import UnknownParameterError as UnknownParameterError
from treadle.base.errors import UnreachedWarning as UnreachedWarning
from treadle.base.version import __version__ as __version__
from treadle.batching.associative import associative_scan as associative_scan
from treadle.batching.vmap import vmap as vmap
from treadle.distributed.config import DataParallel as DataParallel
from treadle.domains.anomaly import Anomaly as Anomaly
from treadle.domains.anomaly import AnomalyError as AnomalyError
from treadle.fft.short_time import istft as istft
from treadle.fft.short_time import stft as stft
from treadle.frontend import random as random
from treadle.frontend import special as special
from treadle.frontend.branches import cond as cond
from treadle.frontend.branches import while_loop as while_loop
from treadle.frontend.coerce import tensor as tensor
from treadle.frontend.control import checkpoint as checkpoint
from treadle.frontend.control import scan as scan
from treadle.frontend.functions.activations import celu as celu
from treadle.frontend.functions.activations import elu as elu
from treadle.frontend.functions.activations import geglu as geglu
from treadle.frontend.functions.activations import gelu as gelu
from treadle.frontend.functions.activations import glu as glu
from treadle.frontend.functions.activations import hardshrink as hardshrink
from treadle.frontend.functions.activations import hardsigmoid as hardsigmoid
from treadle.frontend.functions.activations import hardswish as hardswish
from treadle.frontend.functions.activations import hardtanh as hardtanh
from treadle.frontend.functions.activations import layer_norm as layer_norm
from treadle.frontend.functions.activations import leaky_relu as leaky_relu
from treadle.frontend.functions.activations import log_sigmoid as log_sigmoid
from treadle.frontend.functions.activations import log_softmax as log_softmax
from treadle.frontend.functions.activations import mish as mish
from treadle.frontend.functions.activations import prelu as prelu
from treadle.frontend.functions.activations import relu as relu
from treadle.frontend.functions.activations import relu6 as relu6
from treadle.frontend.functions.activations import rms_norm as rms_norm
from treadle.frontend.functions.activations import selu as selu
from treadle.frontend.functions.activations import sigmoid as sigmoid
from treadle.frontend.functions.activations import silu as silu
from treadle.frontend.functions.activations import softmax as softmax
from treadle.frontend.functions.activations import softplus as softplus
from treadle.frontend.functions.activations import softshrink as softshrink
from treadle.frontend.functions.activations import softsign as softsign
from treadle.frontend.functions.activations import swiglu as swiglu
from treadle.frontend.functions.activations import tanhshrink as tanhshrink
from treadle.frontend.functions.activations import threshold as threshold
from treadle.frontend.functions.arithmetic import abs as abs
from treadle.frontend.functions.arithmetic import add as add
from treadle.frontend.functions.arithmetic import atan2 as atan2
from treadle.frontend.functions.arithmetic import bitwise_and as bitwise_and
from treadle.frontend.functions.arithmetic import bitwise_not as bitwise_not
from treadle.frontend.functions.arithmetic import bitwise_or as bitwise_or
from treadle.frontend.functions.arithmetic import bitwise_xor as bitwise_xor
from treadle.frontend.functions.arithmetic import cast as cast
from treadle.frontend.functions.arithmetic import ceil as ceil
from treadle.frontend.functions.arithmetic import clamp as clamp
from treadle.frontend.functions.arithmetic import cos as cos
from treadle.frontend.functions.arithmetic import div as div
from treadle.frontend.functions.arithmetic import eq as eq
from treadle.frontend.functions.arithmetic import erf as erf
from treadle.frontend.functions.arithmetic import exp as exp
from treadle.frontend.functions.arithmetic import expm1 as expm1
from treadle.frontend.functions.arithmetic import floor as floor
from treadle.frontend.functions.arithmetic import floor_divide as floor_divide
from treadle.frontend.functions.arithmetic import ge as ge
from treadle.frontend.functions.arithmetic import gt as gt
from treadle.frontend.functions.arithmetic import isfinite as isfinite
from treadle.frontend.functions.arithmetic import isnan as isnan
from treadle.frontend.functions.arithmetic import le as le
from treadle.frontend.functions.arithmetic import log as log
from treadle.frontend.functions.arithmetic import log1p as log1p
from treadle.frontend.functions.arithmetic import log2 as log2
from treadle.frontend.functions.arithmetic import logical_and as logical_and
from treadle.frontend.functions.arithmetic import logical_not as logical_not
from treadle.frontend.functions.arithmetic import logical_or as logical_or
from treadle.frontend.functions.arithmetic import logical_xor as logical_xor
from treadle.frontend.functions.arithmetic import lt as lt
from treadle.frontend.functions.arithmetic import maximum as maximum
from treadle.frontend.functions.arithmetic import minimum as minimum
from treadle.frontend.functions.arithmetic import mul as mul
from treadle.frontend.functions.arithmetic import ne as ne
from treadle.frontend.functions.arithmetic import neg as neg
from treadle.frontend.functions.arithmetic import reciprocal as reciprocal
from treadle.frontend.functions.arithmetic import remainder as remainder
from treadle.frontend.functions.arithmetic import round as round
from treadle.frontend.functions.arithmetic import rsqrt as rsqrt
from treadle.frontend.functions.arithmetic import sign as sign
from treadle.frontend.functions.arithmetic import sin as sin
from treadle.frontend.functions.arithmetic import sqrt as sqrt
from treadle.frontend.functions.arithmetic import square as square
from treadle.frontend.functions.arithmetic import stop_gradient as stop_gradient
from treadle.frontend.functions.arithmetic import sub as sub
from treadle.frontend.functions.arithmetic import tanh as tanh
from treadle.frontend.functions.arithmetic import where as where
from treadle.frontend.functions.arranging import block_diag as block_diag
from treadle.frontend.functions.arranging import broadcast_tensors as broadcast_tensors
from treadle.frontend.functions.arranging import isin as isin
from treadle.frontend.functions.arranging import rot90 as rot90
from treadle.frontend.functions.arranging import tensor_split as tensor_split
from treadle.frontend.functions.distances import cdist as cdist
from treadle.frontend.functions.distances import cosine_similarity as cosine_similarity
from treadle.frontend.functions.distances import normalize as normalize
from treadle.frontend.functions.distances import pairwise_distance as pairwise_distance
from treadle.frontend.functions.distances import squared_distances as squared_distances
from treadle.frontend.functions.distances import vector_norm as vector_norm
from treadle.frontend.functions.dynamic import dynamic_slice as dynamic_slice
from treadle.frontend.functions.dynamic import dynamic_update_slice as dynamic_update_slice
from treadle.frontend.functions.elementary import acos as acos
from treadle.frontend.functions.elementary import acosh as acosh
from treadle.frontend.functions.elementary import addcdiv as addcdiv
from treadle.frontend.functions.elementary import addcmul as addcmul
from treadle.frontend.functions.elementary import asin as asin
from treadle.frontend.functions.elementary import asinh as asinh
from treadle.frontend.functions.elementary import atan as atan
from treadle.frontend.functions.elementary import atanh as atanh
from treadle.frontend.functions.elementary import copysign as copysign
from treadle.frontend.functions.elementary import cosh as cosh
from treadle.frontend.functions.elementary import dropout as dropout
from treadle.frontend.functions.elementary import fmax as fmax
from treadle.frontend.functions.elementary import fmin as fmin
from treadle.frontend.functions.elementary import fmod as fmod
from treadle.frontend.functions.elementary import frac as frac
from treadle.frontend.functions.elementary import hypot as hypot
from treadle.frontend.functions.elementary import isinf as isinf
from treadle.frontend.functions.elementary import lerp as lerp
from treadle.frontend.functions.elementary import log10 as log10
from treadle.frontend.functions.elementary import logaddexp as logaddexp
from treadle.frontend.functions.elementary import masked_fill as masked_fill
from treadle.frontend.functions.elementary import nan_to_num as nan_to_num
from treadle.frontend.functions.elementary import signbit as signbit
from treadle.frontend.functions.elementary import sinh as sinh
from treadle.frontend.functions.elementary import tan as tan
from treadle.frontend.functions.elementary import trunc as trunc
from treadle.frontend.functions.gamma import digamma as digamma
from treadle.frontend.functions.gamma import lgamma as lgamma
from treadle.frontend.functions.gamma import polygamma as polygamma
from treadle.frontend.functions.grids import affine_grid as affine_grid
from treadle.frontend.functions.grids import grid_sample as grid_sample
from treadle.frontend.functions.images import channel_shuffle as channel_shuffle
from treadle.frontend.functions.images import conv_transpose as conv_transpose
from treadle.frontend.functions.images import fold as fold
from treadle.frontend.functions.images import interpolate as interpolate
from treadle.frontend.functions.images import pixel_shuffle as pixel_shuffle
from treadle.frontend.functions.images import pixel_unshuffle as pixel_unshuffle
from treadle.frontend.functions.images import unfold as unfold
from treadle.frontend.functions.incomplete_gamma import igamma as igamma
from treadle.frontend.functions.incomplete_gamma import igammac as igammac
from treadle.frontend.functions.indexing import embedding as embedding
from treadle.frontend.functions.indexing import one_hot as one_hot
from treadle.frontend.functions.indexing import scatter_add as scatter_add
from treadle.frontend.functions.indexing import take as take
from treadle.frontend.functions.indexing import take_along_axis as take_along_axis
from treadle.frontend.functions.linear import attention as attention
from treadle.frontend.functions.linear import conv as conv
from treadle.frontend.functions.linear import cross as cross
from treadle.frontend.functions.linear import einsum as einsum
from treadle.frontend.functions.linear import linear as linear
from treadle.frontend.functions.linear import matmul as matmul
from treadle.frontend.functions.moments import corrcoef as corrcoef
from treadle.frontend.functions.moments import count_nonzero as count_nonzero
from treadle.frontend.functions.moments import cov as cov
from treadle.frontend.functions.moments import cumulative_trapezoid as cumulative_trapezoid
from treadle.frontend.functions.moments import nanmean as nanmean
from treadle.frontend.functions.moments import nansum as nansum
from treadle.frontend.functions.moments import trapezoid as trapezoid
from treadle.frontend.functions.padding import pad as pad
from treadle.frontend.functions.pooling import adaptive_avg_pool as adaptive_avg_pool
from treadle.frontend.functions.pooling import adaptive_max_pool as adaptive_max_pool
from treadle.frontend.functions.pooling import avg_pool as avg_pool
from treadle.frontend.functions.pooling import lp_pool as lp_pool
from treadle.frontend.functions.pooling import max_pool as max_pool
from treadle.frontend.functions.pooling import max_pool_with_indices as max_pool_with_indices
from treadle.frontend.functions.pooling import max_unpool as max_unpool
from treadle.frontend.functions.powers import pow as pow
from treadle.frontend.functions.reductions import all as all
from treadle.frontend.functions.reductions import any as any
from treadle.frontend.functions.reductions import argmax as argmax
from treadle.frontend.functions.reductions import argmin as argmin
from treadle.frontend.functions.reductions import argsort as argsort
from treadle.frontend.functions.reductions import cumsum as cumsum
from treadle.frontend.functions.reductions import logsumexp as logsumexp
from treadle.frontend.functions.reductions import max as max
from treadle.frontend.functions.reductions import mean as mean
from treadle.frontend.functions.reductions import min as min
from treadle.frontend.functions.reductions import norm as norm
from treadle.frontend.functions.reductions import prod as prod
from treadle.frontend.functions.reductions import sort as sort
from treadle.frontend.functions.reductions import std as std
from treadle.frontend.functions.reductions import sum as sum
from treadle.frontend.functions.reductions import topk as topk
from treadle.frontend.functions.reductions import var as var
from treadle.frontend.functions.scattering import index_add as index_add
from treadle.frontend.functions.scattering import index_copy as index_copy
from treadle.frontend.functions.scattering import index_fill as index_fill
from treadle.frontend.functions.scattering import index_put as index_put
from treadle.frontend.functions.scattering import masked_scatter as masked_scatter
from treadle.frontend.functions.scattering import scatter_reduce as scatter_reduce
from treadle.frontend.functions.segments import bincount as bincount
from treadle.frontend.functions.segments import nonzero as nonzero
from treadle.frontend.functions.segments import scatter as scatter
from treadle.frontend.functions.segments import scatter_add_along as scatter_add_along
from treadle.frontend.functions.segments import scatter_max as scatter_max
from treadle.frontend.functions.segments import searchsorted as searchsorted
from treadle.frontend.functions.segments import segment_max as segment_max
from treadle.frontend.functions.segments import segment_mean as segment_mean
from treadle.frontend.functions.segments import segment_min as segment_min
from treadle.frontend.functions.segments import segment_softmax as segment_softmax
from treadle.frontend.functions.segments import segment_sum as segment_sum
from treadle.frontend.functions.sequences import cummax as cummax
from treadle.frontend.functions.sequences import cummin as cummin
from treadle.frontend.functions.sequences import cumprod as cumprod
from treadle.frontend.functions.sequences import diag as diag
from treadle.frontend.functions.sequences import diag_embed as diag_embed
from treadle.frontend.functions.sequences import diagonal as diagonal
from treadle.frontend.functions.sequences import kron as kron
from treadle.frontend.functions.sequences import linspace as linspace
from treadle.frontend.functions.sequences import logcumsumexp as logcumsumexp
from treadle.frontend.functions.sequences import logspace as logspace
from treadle.frontend.functions.sequences import meshgrid as meshgrid
from treadle.frontend.functions.sequences import outer as outer
from treadle.frontend.functions.sequences import repeat_interleave as repeat_interleave
from treadle.frontend.functions.shaping import arange as arange
from treadle.frontend.functions.shaping import chunk as chunk
from treadle.frontend.functions.shaping import concat as concat
from treadle.frontend.functions.shaping import expand as expand
from treadle.frontend.functions.shaping import eye as eye
from treadle.frontend.functions.shaping import flatten as flatten
from treadle.frontend.functions.shaping import flip as flip
from treadle.frontend.functions.shaping import full as full
from treadle.frontend.functions.shaping import iota as iota
from treadle.frontend.functions.shaping import moveaxis as moveaxis
from treadle.frontend.functions.shaping import ones as ones
from treadle.frontend.functions.shaping import ones_like as ones_like
from treadle.frontend.functions.shaping import permute as permute
from treadle.frontend.functions.shaping import repeat as repeat
from treadle.frontend.functions.shaping import reshape as reshape
from treadle.frontend.functions.shaping import roll as roll
from treadle.frontend.functions.shaping import split as split
from treadle.frontend.functions.shaping import squeeze as squeeze
from treadle.frontend.functions.shaping import stack as stack
from treadle.frontend.functions.shaping import transpose as transpose
from treadle.frontend.functions.shaping import tril as tril
from treadle.frontend.functions.shaping import triu as triu
from treadle.frontend.functions.shaping import unsqueeze as unsqueeze
from treadle.frontend.functions.shaping import zeros as zeros
from treadle.frontend.functions.shaping import zeros_like as zeros_like
from treadle.frontend.functions.special import entr as entr
from treadle.frontend.functions.special import erfc as erfc
from treadle.frontend.functions.special import erfinv as erfinv
from treadle.frontend.functions.special import log_ndtr as log_ndtr
from treadle.frontend.functions.special import logit as logit
from treadle.frontend.functions.special import ndtr as ndtr
from treadle.frontend.functions.special import xlogy as xlogy
from treadle.frontend.functions.statistics import diff as diff
from treadle.frontend.functions.statistics import median as median
from treadle.frontend.functions.statistics import quantile as quantile
from treadle.frontend.functions.windows import bartlett_window as bartlett_window
from treadle.frontend.functions.windows import blackman_window as blackman_window
from treadle.frontend.functions.windows import hamming_window as hamming_window
from treadle.frontend.functions.windows import hann_window as hann_window
from treadle.frontend.functions.windows import kaiser_window as kaiser_window
from treadle.frontend.mean import Mean as Mean
from treadle.frontend.tensor import Tensor as Tensor
from treadle.frontend.tracing import capture as capture
from treadle.frontend.tracing import debug_print as debug_print
from treadle.frontend.tracing import metric as metric
from treadle.frontend.tracing import trace as trace
from treadle.ir.graph import Graph as Graph
from treadle.ir.types import Spec as Spec
from treadle.nn.module import update as update
from treadle.nn.summary import summary as summary
from treadle.pipeline import CompileOptions as CompileOptions
from treadle.pipeline import CompileReport as CompileReport
from treadle.step.compile import compile_manual_step as compile_manual_step
from treadle.step.compile import compile_step as compile_step
from treadle.step.ensemble import Ensemble as Ensemble
from treadle.step.ensemble import ensemble as ensemble
from treadle.step.forward import Forward as Forward
from treadle.step.forward import Program as Program
from treadle.step.forward import compile as compile
from treadle.step.forward import compile_forward as compile_forward
from treadle.step.results import EvalResult as EvalResult
from treadle.step.results import RunResult as RunResult
from treadle.step.results import StepResult as StepResult
from treadle.step.train_step import TrainStep as TrainStep
from treadle.step.watching import Histogram as Histogram

if _typing.TYPE_CHECKING:
    from treadle import data as data
    from treadle import distributions as distributions
    from treadle import interop as interop
    from treadle import metrics as metrics
    from treadle import models as models
    from treadle.backends.calibration import calibrate as calibrate
    from treadle.train import callbacks as callbacks
    from treadle.train import loggers as loggers
    from treadle.train.accumulator import AccumulationStats as AccumulationStats
    from treadle.train.accumulator import GradientAccumulator as GradientAccumulator
    from treadle.train.checkpoint import Checkpoint as Checkpoint
    from treadle.train.checkpoint import CheckpointManager as CheckpointManager
    from treadle.train.history import History as History
    from treadle.train.trainer import Trainer as Trainer

# Names whose modules are imported when they are first used, so that importing Treadle stays quick.
_LATER = {
    "calibrate": "backends.calibration",
    "data": "data",
    "distributions": "distributions",
    "interop": "interop",
    "metrics": "metrics",
    "models": "models",
    "callbacks": "train.callbacks",
    "loggers": "train.loggers",
    "AccumulationStats": "train.accumulator",
    "GradientAccumulator": "train.accumulator",
    "Checkpoint": "train.checkpoint",
    "CheckpointManager": "train.checkpoint",
    "History": "train.history",
    "Trainer": "train.trainer",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise _elsewhere.unknown("treadle", name, _elsewhere.TREADLE, __dir__())
    module = _importlib.import_module(f"{__name__}.{_LATER[name]}")
    found = module if _LATER[name].endswith(name) else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
