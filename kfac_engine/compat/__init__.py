"""Provides the classes of ``curvature`` under the names of TensorFlow's K-FAC library."""
