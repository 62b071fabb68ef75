"""Estimates the spectrum of a whole curvature matrix from its products with vectors."""
