"""The tests of this folder need scikit-learn, which the extras ``test`` and ``dev`` install."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("sklearn") else ["test_*.py"]
