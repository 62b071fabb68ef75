"""Sets of operators whose results contain unchanged entries of their operands."""

# The result has every entry of the first operand once.
RELAYS = frozenset(
    {"Cast", "CastLike", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)

# The result has entries of the first operand.
MOVES = RELAYS | {"Gather", "Slice", "Split"}

# The result depends on the shape of the operand, not on its entries.
ONLY_SHAPES = frozenset({"Shape", "Size"})
