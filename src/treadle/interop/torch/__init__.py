"""PyTorch both ways: its modules and state dicts here, and compiled programs in its autograd."""

from treadle.interop.torch.autograd import as_autograd as as_autograd
from treadle.interop.torch.module import from_module as from_module
from treadle.interop.torch.states import load_state_dict as load_state_dict
from treadle.interop.torch.states import state_dict as state_dict
