"""Implements the array operations with CuPy."""
