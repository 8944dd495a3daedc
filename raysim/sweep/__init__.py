"""Many runs: grids, several at a time, the papers' tables, searches."""
