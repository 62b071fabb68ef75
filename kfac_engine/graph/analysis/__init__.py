"""Properties of a canonical graph: parameters, ties, dependencies."""
