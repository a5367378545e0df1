"""Functions of tensors, eager or traced alike."""
