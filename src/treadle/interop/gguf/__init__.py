"""GGUF files, as llama.cpp has them: open one, write one, and the blocks of few bits in them.

`models.load("x.gguf")` and `models.save(model, "x.gguf", dtype="q8_0")` are the way for models.
"""

from treadle.interop.gguf.container import Entry as Entry
from treadle.interop.gguf.container import File as File
from treadle.interop.gguf.container import load as load
from treadle.interop.gguf.writing import save as save
