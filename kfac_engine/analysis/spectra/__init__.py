"""Spectra of whole curvature matrices, from products with vectors."""
