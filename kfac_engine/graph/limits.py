"""Limits on the expansion of a model. A larger model is refused before it runs."""

# Nodes of a model whose functions are inlined.
MOST_NODES = 1_000_000
# Iterations of a Loop with a constant trip count, times those of the loops around it.
MOST_TRIPS = 1_000_000
# Entries of a value whose size is written in the file: 16 GiB in float32.
MOST_ENTRIES = 2**32
# Seconds of a sample run, which determines types and shapes: a loop may not terminate.
MOST_SECONDS = 600
