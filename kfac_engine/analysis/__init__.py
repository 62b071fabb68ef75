"""Analyzes trained models: their curvature, uncertainty, influence, pruning and spectra."""
