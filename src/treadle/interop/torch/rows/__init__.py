"""What each ATen op means here, a family in each file. None of them imports PyTorch."""
