"""Trains an engine's parameters with optimizers and ``fit``."""
