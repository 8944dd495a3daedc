"""The command line: one file a command group. It imports neither torch nor ray before a command needs them."""
