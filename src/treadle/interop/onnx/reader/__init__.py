"""An ONNX file as a module."""
