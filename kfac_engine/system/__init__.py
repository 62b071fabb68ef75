"""The operating system: files, free memory, time."""
