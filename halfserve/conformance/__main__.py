"""`python -m halfserve.conformance` is the command `halfserve conformance`."""

import sys

from halfserve.cli import main

main(["conformance", *sys.argv[1:]])
