"""Reads data sets from arrays, files, folders and batches for the whole package."""
