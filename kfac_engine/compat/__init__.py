"""The names of TensorFlow's K-FAC library for the general classes of ``curvature``."""
