"""Metrics: statistics of batches inside a program, their value at the end."""

from treadle.metrics.boxes import MeanAveragePrecision as MeanAveragePrecision
from treadle.metrics.boxes import box_iou as box_iou
from treadle.metrics.boxes import match_boxes as match_boxes
from treadle.metrics.calibration import ECE as ECE
from treadle.metrics.calibration import MCE as MCE
from treadle.metrics.classification import F1 as F1
from treadle.metrics.classification import Accuracy as Accuracy
from treadle.metrics.classification import BalancedAccuracy as BalancedAccuracy
from treadle.metrics.classification import CohenKappa as CohenKappa
from treadle.metrics.classification import ConfusionMatrix as ConfusionMatrix
from treadle.metrics.classification import Dice as Dice
from treadle.metrics.classification import IoU as IoU
from treadle.metrics.classification import MatthewsCorrelation as MatthewsCorrelation
from treadle.metrics.classification import Precision as Precision
from treadle.metrics.classification import Recall as Recall
from treadle.metrics.means import NDCG as NDCG
from treadle.metrics.means import Average as Average
from treadle.metrics.means import Perplexity as Perplexity
from treadle.metrics.means import TopK as TopK
from treadle.metrics.metric import Group as Group
from treadle.metrics.metric import Metric as Metric
from treadle.metrics.ranking import AveragePrecision as AveragePrecision
from treadle.metrics.ranking import PrecisionRecallCurve as PrecisionRecallCurve
from treadle.metrics.ranking import RocAuc as RocAuc
from treadle.metrics.ranking import RocCurve as RocCurve
