"""Analyses of trained models: curvature, uncertainty, influence, pruning, spectra."""
