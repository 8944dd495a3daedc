"""What a run leaves on disk: whole files, tables, manifest, traces."""
