"""Data sets: arrays, files, folders and batches, in one meaning for the whole package."""
