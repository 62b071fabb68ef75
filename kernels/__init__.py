"""CUDA sources of the CuPy backend and what launches them; importing it needs no GPU."""
