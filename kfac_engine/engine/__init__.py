"""Computes gradients, curvature statistics and preconditioned gradients of one model."""
