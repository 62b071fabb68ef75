"""Provides NumPy and CuPy behind one interface; NumPy defines the results."""
