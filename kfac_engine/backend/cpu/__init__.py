"""Implements the array operations with NumPy and SciPy."""
