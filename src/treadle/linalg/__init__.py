"""Linear algebra of small matrices, in stacks, by PyTorch's names."""

from treadle.linalg.elimination import LU as LU
from treadle.linalg.elimination import SLogDet as SLogDet
from treadle.linalg.elimination import det as det
from treadle.linalg.elimination import inv as inv
from treadle.linalg.elimination import lu as lu
from treadle.linalg.elimination import slogdet as slogdet
from treadle.linalg.elimination import solve as solve
from treadle.linalg.orthogonal import QR as QR
from treadle.linalg.orthogonal import LstSq as LstSq
from treadle.linalg.orthogonal import lstsq as lstsq
from treadle.linalg.orthogonal import qr as qr
from treadle.linalg.triangular import cholesky as cholesky
from treadle.linalg.triangular import solve_triangular as solve_triangular
