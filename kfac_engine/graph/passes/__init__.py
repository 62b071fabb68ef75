"""Rewrites a model file into the canonical graph."""
