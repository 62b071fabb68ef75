"""Pure linear algebra on a backend: patch covariances, inverses and powers, Kronecker products."""
