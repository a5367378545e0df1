"""Callbacks: what happens around a step, beside it."""

from treadle.train.averaging import EMA as EMA
from treadle.train.averaging import SWA as SWA
from treadle.train.callback import Callback as Callback
from treadle.train.callback import Lambda as Lambda
from treadle.train.monitors import GradientMonitor as GradientMonitor
from treadle.train.monitors import HistogramRecord as HistogramRecord
from treadle.train.monitors import Histograms as Histograms
from treadle.train.monitors import Profiler as Profiler
from treadle.train.rates import RateFinder as RateFinder
from treadle.train.run import Run as Run
from treadle.train.stopping import EarlyStopping as EarlyStopping
from treadle.train.stopping import ReduceOnPlateau as ReduceOnPlateau
