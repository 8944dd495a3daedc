"""Tables and figures, drawn from what a run has written."""
