"""`python -m tuner.cli`: the command without its script."""

from tuner.cli import main

main()
