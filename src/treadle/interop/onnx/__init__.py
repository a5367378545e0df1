"""ONNX files, both ways: `export` writes a forward program, `load` reads a model that trains."""

from treadle.interop.onnx.reader.module import OnnxModule as OnnxModule
from treadle.interop.onnx.reader.module import load as load
from treadle.interop.onnx.reader.module import operators as operators
from treadle.interop.onnx.writer.export import export as export
