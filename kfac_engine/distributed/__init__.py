"""Several processes: collectives, agreement, owners of layers, and their cost."""
