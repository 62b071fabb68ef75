"""Determines the parameters, ties and dependencies of a canonical graph."""
