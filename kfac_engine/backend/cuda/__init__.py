"""The CuPy backend."""
