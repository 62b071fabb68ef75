"""The array library, chosen once: NumPy is the definition, others must equal it."""
