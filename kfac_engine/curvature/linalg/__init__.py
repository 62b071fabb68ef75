"""Computes patch covariances, inverses, powers and Kronecker products with a backend."""
