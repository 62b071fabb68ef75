"""The run report: a page with the charts and tables of one training run."""
