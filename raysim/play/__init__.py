"""One run, played: from Python or in a terminal, round by round, stopped and continued."""
