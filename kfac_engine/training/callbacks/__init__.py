"""Provides callbacks of `fit`: early stop, best weights, weight averages and TensorBoard."""
