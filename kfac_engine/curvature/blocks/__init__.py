"""Curvature blocks: the Fisher matrix of one layer, approximated."""
