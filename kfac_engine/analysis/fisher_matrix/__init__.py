"""Measures the curvature of a trained model, and returns its spectrum, products and samples."""
