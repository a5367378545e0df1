"""Functions without rows of special points, each with the reason: tests/test_points.py wants all."""

from __future__ import annotations

ELSEWHERE = {
    "moves, repeats or makes elements and computes none": """
        affine_grid arange block_diag broadcast_tensors channel_shuffle chunk concat diag diag_embed
        diagonal dynamic_slice dynamic_update_slice embedding expand eye flatten flip fold full iota
        linspace logspace meshgrid moveaxis one_hot ones ones_like pad permute pixel_shuffle
        pixel_unshuffle repeat repeat_interleave reshape roll rot90 split squeeze stack take
        take_along_axis tensor tensor_split transpose tril triu unfold unsqueeze zeros zeros_like
        cast masked_scatter bartlett_window blackman_window fft.fftshift fft.ifftshift hamming_window
        hann_window index_copy kaiser_window index_fill index_put scatter nonzero
        """,
    "sums of products: nothing is special in them, or IEEE 754 says it": """
        bincount conv conv_transpose cross cumulative_trapezoid einsum grid_sample index_add
        interpolate kron linalg.cross linalg.matrix_power linalg.multi_dot linear outer scatter_add
        scatter_add_along segment_mean segment_sum istft stft
        """,
    "integers and conditions: test_integers": """
        bitwise_and bitwise_not bitwise_or bitwise_xor logical_and logical_not logical_or
        logical_xor
        """,
    "matrices: tests/test_linalg.py, singular and equal eigenvalues included": """
        linalg.cholesky linalg.cond linalg.det linalg.eigh linalg.eigvalsh linalg.inv linalg.lstsq
        linalg.lu linalg.matrix_exp linalg.matrix_norm linalg.matrix_rank linalg.norm linalg.pinv
        linalg.qr linalg.slogdet linalg.solve linalg.solve_triangular linalg.svd linalg.svdvals
        linalg.vector_norm
        """,
    "Fourier transforms and pairs: tests/test_fft.py": """
        fft.abs fft.angle fft.complex fft.conj fft.einsum fft.fft fft.fft2 fft.fftn fft.ifft
        fft.ifft2 fft.ifftn fft.imag fft.irfft fft.irfft2 fft.irfftn fft.multiply fft.real fft.rfft
        fft.rfft2 fft.rfftn
        """,
    "rows that see nothing, and ties: test_edges.py, test_scattering.py": "attention scatter_reduce",
    "random numbers": """
        dropout random.bernoulli random.bits random.categorical random.gumbel_softmax random.multinomial
        random.normal random.randint random.seed random.uniform
        """,
    "programs, gradients and loops": """
        associative_scan calibrate capture checkpoint compile compile_forward compile_manual_step
        compile_step cond custom_vjp debug_print ensemble grad jvp metric scan summary trace update
        value_and_grad vjp vmap while_loop
        """,
    "relatives of lgamma: tests/test_special_functions.py": "polygamma igamma igammac",
}
