"""The error of this package."""


class EvidenceError(ValueError):
    """A report, policy or measurement is not what it must be (exit code 4)."""
