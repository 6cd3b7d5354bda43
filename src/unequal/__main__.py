"""`python -m unequal` is the command line."""

from .cli import main

main()
