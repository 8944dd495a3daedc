"""`python -m raysim` is the command `raysim`."""

from raysim.cli.main import main

if __name__ == "__main__":
    main()
