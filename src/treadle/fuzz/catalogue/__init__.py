"""The forms that random programs are made of. Importing this package fills the table."""

from treadle.fuzz.catalogue import elementwise as elementwise
from treadle.fuzz.catalogue import idioms as idioms
from treadle.fuzz.catalogue import indexing as indexing
from treadle.fuzz.catalogue import layers as layers
from treadle.fuzz.catalogue import linear as linear
from treadle.fuzz.catalogue import losses as losses
from treadle.fuzz.catalogue import reductions as reductions
from treadle.fuzz.catalogue import scans as scans
from treadle.fuzz.catalogue import shaping as shaping
from treadle.fuzz.catalogue import transforms as transforms
