"""What users write: tensors, functions of tensors, and the tracer."""
