"""Data: loaders, files, text, splits, encoders; and digits that come with the package.

README.md beside it records sources and licences.
"""

from treadle.data.bpe import BPE as BPE
from treadle.data.digits import load_digits as load_digits
from treadle.data.encoders import LabelEncoder as LabelEncoder
from treadle.data.encoders import OneHotEncoder as OneHotEncoder
from treadle.data.encoders import Standardiser as Standardiser
from treadle.data.files import read_idx as read_idx
from treadle.data.files import read_npy as read_npy
from treadle.data.files import read_raw as read_raw
from treadle.data.loaders import ArrayLoader as ArrayLoader
from treadle.data.loaders import IterableLoader as IterableLoader
from treadle.data.loaders import Loader as Loader
from treadle.data.loaders import as_loader as as_loader
from treadle.data.prefetch import Prefetch as Prefetch
from treadle.data.sources import Ordered as Ordered
from treadle.data.sources import Source as Source
from treadle.data.sources import TextWindows as TextWindows
from treadle.data.splits import split as split
from treadle.data.tables import columns_matrix as columns_matrix
from treadle.data.tables import read_csv as read_csv
