"""`python -m halfserve` is the command `halfserve`."""

from halfserve.cli import main

main()
