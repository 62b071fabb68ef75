"""CUDA kernels of the CuPy backend, and the functions that launch them."""
