"""Rewrites of a model file into the canonical graph."""
