"""Methods of TensorFlow's K-FAC library that the general classes inherit.

Each mixin calls the class that it is mixed into and nothing above it, so that the general classes
can inherit from it and be read without it.
"""
