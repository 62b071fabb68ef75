"""Measures the statistics of curvature blocks, and averages them over batches."""
