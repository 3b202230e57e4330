"""The error of this package."""


class ArtifactError(ValueError):
    """A checkpoint, tensor or file is not what it must be (exit code 4)."""
