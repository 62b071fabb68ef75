"""Methods of a block that TensorFlow's library names beside its general ones."""

from typing import Protocol

from kfac_engine._types import Vector


class Block(Protocol):
    """The part of ``FisherBlock`` that the mixin calls."""

    def register_matpower(self, exp: float) -> None:
        """Have a power computed at each refresh."""

    def multiply_matpower(self, vector: Vector, exp: float) -> Vector:
        """Multiply a power by a vector."""


class InverseProducts:
    """The powers 1 and −1 of a block under names of their own."""

    def register_inverse(self: Block) -> None:
        """Have the inverse computed at each refresh."""
        self.register_matpower(-1)

    def multiply(self: Block, vector: Vector) -> Vector:
        """Multiply the damped block, from the current averages, by a vector."""
        return self.multiply_matpower(vector, 1)

    def multiply_inverse(self: Block, vector: Vector) -> Vector:
        """Multiply the inverse of the damped block, as of the last refresh, by a vector."""
        return self.multiply_matpower(vector, -1)
