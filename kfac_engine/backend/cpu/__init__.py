"""The NumPy and SciPy backend."""
