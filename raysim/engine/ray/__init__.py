"""Hosts and the driver as Ray actors, on one machine or a cluster. But for the search in `raysim.sweep.tune`, only this
package imports Ray."""

import os

# Ray reads these as it is imported. `uv run` would otherwise make it rebuild the environment for every worker, which has
# it already; an actor without a share of a GPU is to see none, without a warning; and what Ray prints of dead processes
# is to be silent whatever `log_to_driver` says. A process that has lost its raylet ends at once and without a word where that
# has ended too; a driver takes its parent for it, which `nohup raysim run &` in a closed terminal has lost, so it is told
# that of a process that never ends. Ray tells its workers theirs.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
os.environ.setdefault("RAY_RAYLET_PID", "1")
