"""The home of the CUDA sources of the CuPy backend: none yet, the NumPy backend needs none."""
