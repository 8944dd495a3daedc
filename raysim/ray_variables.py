"""What Ray reads from the environment as it is imported. A user's module may import it before raysim does."""

import os

# `uv run` would otherwise make Ray rebuild the environment for every worker, which has it already; an actor without a share of
# a GPU is to see none, without a warning; and what Ray prints of dead processes is to be silent whatever `log_to_driver` says.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")

# A process that cannot reach its raylet ends at once, without a word, if the raylet has ended. A driver takes its parent for the
# raylet, and `nohup raysim run &` in a terminal that was closed has no parent. Process 1 never ends. Ray gives workers the number
# of their raylet.
os.environ.setdefault("RAY_RAYLET_PID", "1")
