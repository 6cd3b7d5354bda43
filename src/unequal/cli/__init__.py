"""The command line: `unequal train | evaluate | import | generate`."""

from .commands import app, main

__all__ = ["app", "main"]
