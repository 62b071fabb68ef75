"""Access to the operating system: files and free memory."""
