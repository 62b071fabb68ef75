"""Approximates the Fisher matrix of each layer by a curvature block."""
