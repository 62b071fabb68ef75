"""Methods of a block for the powers 1 and −1, as in TensorFlow's library."""

from typing import Protocol

from kfac_engine._types import Vector


class Block(Protocol):
    """The part of ``FisherBlock`` that the mixin calls."""

    def register_matpower(self, exp: float) -> None:
        """Register a power, which each refresh then computes."""

    def multiply_matpower(self, vector: Vector, exp: float) -> Vector:
        """Return the product of a power of the block and a vector."""


class InverseProducts:
    """Methods for the powers 1 and −1 of a block."""

    def register_inverse(self: Block) -> None:
        """Register the inverse, which each refresh then computes."""
        self.register_matpower(-1)

    def multiply(self: Block, vector: Vector) -> Vector:
        """Return the product of the damped block, from the current averages, and a vector."""
        return self.multiply_matpower(vector, 1)

    def multiply_inverse(self: Block, vector: Vector) -> Vector:
        """Return the product of the damped inverse of the last refresh and a vector."""
        return self.multiply_matpower(vector, -1)
