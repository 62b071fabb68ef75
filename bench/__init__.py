"""Speed of the primitives beside their definition in plain NumPy: ``run.run_suites``."""
