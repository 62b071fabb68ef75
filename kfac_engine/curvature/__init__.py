"""The Kronecker-factored Fisher matrix: factors, blocks, estimation and refresh schedules."""
