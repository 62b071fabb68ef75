"""Estimates how certain a trained model's predictions are, with Laplace approximations."""
