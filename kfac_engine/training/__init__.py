"""Training: optimizers that change the parameters of an engine, and ``fit``."""
