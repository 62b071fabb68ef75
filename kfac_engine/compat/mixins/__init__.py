"""Methods of TensorFlow's K-FAC library that the general classes inherit.

A mixin calls only methods of the class that inherits from it, so that the general classes can be
read without the mixins.
"""
