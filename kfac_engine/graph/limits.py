"""Limits on the expansion of a model. A larger model is refused before it runs."""

# Largest number of nodes of a model after its functions are inlined.
MOST_NODES = 1_000_000
# Largest number of iterations of a Loop with a constant trip count, times those of the loops around
# it.
MOST_TRIPS = 1_000_000
# Largest number of entries of a value whose size is in the file: 16 GiB in float32.
MOST_ENTRIES = 2**32
# Time limit of a sample run in seconds, because a loop may not terminate.
MOST_SECONDS = 600
