"""Callbacks of `fit`: early stop, best weights, averages of weights, and TensorBoard."""
