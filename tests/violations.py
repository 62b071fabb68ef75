"""One test over all files: a failure lists everything that breaks the rule."""

from collections.abc import Iterable


def assert_none(violations: Iterable[str]) -> None:
    """Fail with all violations, one a line, if there are any."""
    listed = list(violations)
    assert not listed, "\n".join([f"{len(listed)} violations:", *listed])
