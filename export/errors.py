"""The errors of this package."""


class ArtifactError(ValueError):
    """A checkpoint, tensor or file is not what it must be (exit code 4)."""


class OutputExists(ArtifactError):
    """The place to write to is taken, and nobody said that it may be replaced (a matter of usage: exit code 2)."""
