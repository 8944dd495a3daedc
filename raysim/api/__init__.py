"""The Python API: one run, round by round, stopped and continued, from Python or in a terminal."""
