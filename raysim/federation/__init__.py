"""A run: built from a configuration, played round by round, written down, saved and resumed."""
