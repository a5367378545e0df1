"""ONNX files, both ways: `export` writes a forward program, `load` reads a model that trains."""

from treadle.interop.onnx.writer.export import export as export
