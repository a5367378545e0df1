"""HIP C++ from mapped kernels: the text of CUDA's printer, in the words of AMD's compiler."""
