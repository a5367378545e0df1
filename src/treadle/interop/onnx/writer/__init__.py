"""A graph as an ONNX file."""
