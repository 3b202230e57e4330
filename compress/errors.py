"""The two mistakes a user can make; the CLI prints them as one line, without a traceback."""


class RecipeError(ValueError):
    """A flag or a recipe key is wrong (exit code 2)."""


class DataError(ValueError):
    """A data file or a row of it is wrong (exit code 4)."""
