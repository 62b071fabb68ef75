"""Accesses the operating system: files, signals and free memory."""
