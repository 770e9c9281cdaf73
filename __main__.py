"""`python -m kvledger`: the command line."""

from .sim.commands.cli import main

if __name__ == "__main__":
    main()
