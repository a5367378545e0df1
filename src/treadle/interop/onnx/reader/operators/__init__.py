"""What each of ONNX's operators is, in functions of tensors; one file per family."""
