"""Errors a user can act on: each says what was expected, what came and what to do, in one line."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Something the user can mend. The command line prints it as one line, without a traceback, and exits with 1."""


class RecipeError(UserError):
    """A recipe field that is wrong: names the field, what was expected, what came."""

    def __init__(self, field: str, expected: str, got: object, remedy: str = "") -> None:
        self.field = field
        super().__init__(f"{field}: expected {expected}, got {got!r}" + (f"; {remedy}" if remedy else ""))


class DataError(UserError):
    """Input data that cannot be used: names file, column, row and remedy, as far as each is known."""

    def __init__(
        self, problem: str, *, file: object = None, column: str | None = None, row: int | None = None, remedy: str = ""
    ) -> None:
        where = [str(file)] if file is not None else []
        where += [f"column '{column}'"] if column is not None else []
        where += [f"row {row}"] if row is not None else []
        self.problem, self.file, self.column, self.row = problem, file, column, row
        super().__init__((", ".join(where) + ": " if where else "") + problem + (f"; {remedy}" if remedy else ""))


class CheckpointError(UserError):
    """A checkpoint or run folder that cannot be written or read."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for a misspelt name: the closest valid one, else all of them."""
    valid = list(valid)
    close = get_close_matches(name, valid, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return "valid: " + ", ".join(valid) if valid else "nothing is valid here"
