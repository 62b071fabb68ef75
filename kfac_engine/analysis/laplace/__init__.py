"""Laplace approximations: how sure a trained model is."""
