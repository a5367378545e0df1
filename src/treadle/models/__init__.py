"""Models with the parameter names of their reference implementations, and generation."""

from treadle.models.folder import load as load
from treadle.models.folder import load_weights as load_weights
from treadle.models.folder import save as save
from treadle.models.generation import Settings as Settings
from treadle.models.gpt2 import GPT2 as GPT2
from treadle.models.gpt2 import GPT2Config as GPT2Config
from treadle.models.gpt2 import gpt2 as gpt2
from treadle.models.gpt2 import gpt2_config as gpt2_config
from treadle.models.llama import Llama as Llama
from treadle.models.llama import LlamaConfig as LlamaConfig
from treadle.models.llama import llama as llama
from treadle.models.llama import llama_config as llama_config
from treadle.models.model import Model as Model
