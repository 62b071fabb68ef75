"""What all tests share: no file waits for the disk, and no test measures time."""

import os

from hypothesis import HealthCheck, settings

# No test can tell whether a file would survive a loss of power, and thousands would wait for it.
os.fsync = lambda descriptor: None

# A generated example may take any time: other programs share the cores.
settings.register_profile("no time", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no time")
