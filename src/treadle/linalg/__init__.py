"""Linear algebra of small matrices, in stacks, by PyTorch's names."""

from treadle.linalg.elimination import LU as LU
from treadle.linalg.elimination import SLogDet as SLogDet
from treadle.linalg.elimination import det as det
from treadle.linalg.elimination import inv as inv
from treadle.linalg.elimination import lu as lu
from treadle.linalg.elimination import slogdet as slogdet
from treadle.linalg.elimination import solve as solve
from treadle.linalg.norms import cond as cond
from treadle.linalg.norms import matrix_norm as matrix_norm
from treadle.linalg.norms import norm as norm
from treadle.linalg.norms import vector_norm as vector_norm
from treadle.linalg.orthogonal import QR as QR
from treadle.linalg.orthogonal import LstSq as LstSq
from treadle.linalg.orthogonal import lstsq as lstsq
from treadle.linalg.orthogonal import qr as qr
from treadle.linalg.spectral import SVD as SVD
from treadle.linalg.spectral import Eigh as Eigh
from treadle.linalg.spectral import eigh as eigh
from treadle.linalg.spectral import eigvalsh as eigvalsh
from treadle.linalg.spectral import matrix_rank as matrix_rank
from treadle.linalg.spectral import pinv as pinv
from treadle.linalg.spectral import svd as svd
from treadle.linalg.spectral import svdvals as svdvals
from treadle.linalg.triangular import cholesky as cholesky
from treadle.linalg.triangular import solve_triangular as solve_triangular
