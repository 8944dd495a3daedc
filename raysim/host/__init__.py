"""What one process does for its clients: training, their state between rounds, their samples, sums of their models, tests."""
