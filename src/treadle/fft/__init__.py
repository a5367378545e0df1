"""Fourier transforms, and complex numbers as pairs of real ones along a last axis of two."""

from treadle.fft.pairs import abs as abs
from treadle.fft.pairs import angle as angle
from treadle.fft.pairs import complex as complex
from treadle.fft.pairs import conj as conj
from treadle.fft.pairs import einsum as einsum
from treadle.fft.pairs import imag as imag
from treadle.fft.pairs import multiply as multiply
from treadle.fft.pairs import real as real
from treadle.fft.shifts import fftshift as fftshift
from treadle.fft.shifts import ifftshift as ifftshift
from treadle.fft.transforms import fft as fft
from treadle.fft.transforms import fft2 as fft2
from treadle.fft.transforms import fftn as fftn
from treadle.fft.transforms import ifft as ifft
from treadle.fft.transforms import ifft2 as ifft2
from treadle.fft.transforms import ifftn as ifftn
from treadle.fft.transforms import irfft as irfft
from treadle.fft.transforms import irfft2 as irfft2
from treadle.fft.transforms import irfftn as irfftn
from treadle.fft.transforms import rfft as rfft
from treadle.fft.transforms import rfft2 as rfft2
from treadle.fft.transforms import rfftn as rfftn
