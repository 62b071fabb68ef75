"""The home of the speed measurements: none yet; ``python -m kfac_engine demo`` reports wall times."""
