"""Operators that move the entries of an array about and change none."""

# All of the first operand's entries, each once.
RELAYS = frozenset(
    {"Cast", "CastLike", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)

# Some of them.
MOVES = RELAYS | {"Gather", "Slice", "Split"}

# Their result tells of the operand's shape, not of its entries.
ONLY_SHAPES = frozenset({"Shape", "Size"})
