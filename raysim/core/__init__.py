"""The mathematics of federated learning: no engine, no files, no configuration."""
