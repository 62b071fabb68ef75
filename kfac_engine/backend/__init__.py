"""Array libraries behind one interface: NumPy defines the results, and CuPy must equal them."""
