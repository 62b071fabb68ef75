"""CUDA sources of the CuPy backend and the functions that launch them; the import needs no GPU."""
