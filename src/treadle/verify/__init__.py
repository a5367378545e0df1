"""What is checked: samples of every op; later rule proofs, certificates and fuzzing."""
