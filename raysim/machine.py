"""What this machine has: memory, CPUs and threads within a container's limits, and whether something listens at an
address."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
FULL_AT = "RAY_local_fs_capacity_threshold", "0.95"  # the share of a disk that Ray uses, and its default


def cpus() -> int:
    """CPUs that processes started here may use: those that this one may run on, within the container's quota."""
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota() -> float | None:
    """CPUs that the control group grants, or None where there is no limit."""
    if (text := _read(CGROUP / "cpu.max")) is not None:
        quota, period = text.split()
    else:
        quota, period = _read(CGROUP / "cpu/cpu.cfs_quota_us") or "-1", _read(CGROUP / "cpu/cpu.cfs_period_us") or "1"
    return int(quota) / int(period) if quota.isdecimal() else None


def computes_bf16() -> bool:
    """Whether the CPU has instructions for bfloat16; others emulate it, slowly."""
    flags = re.findall(r"^(?:flags|Features)\s*:(.*)$", _read(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return bool(flags) and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[0].split())


def free_memory() -> int | None:
    """Bytes that new processes find free, within the container's limit; None where the system does not say."""
    found = memory_bytes()
    return found and found[1]


def memory_bytes() -> tuple[int, int, bool] | None:
    """Total, available, and whether the container's limit is what counts."""
    info = dict(re.findall(r"(\w+):\s+(\d+) kB", _read(Path("/proc/meminfo")) or ""))
    if not info:
        return None
    total, available = (int(info[key]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit = _read(CGROUP / "memory.max") or _read(CGROUP / "memory/memory.limit_in_bytes")
    used = _read(CGROUP / "memory.current") or _read(CGROUP / "memory/memory.usage_in_bytes")
    if limit and used and limit.isdecimal() and int(limit) < total:
        return int(limit), min(available, int(limit) - int(used)), True
    return total, available, False


def private_memory() -> int:
    """Bytes in memory that this process shares with no file and no other process; 0 where the system does not say."""
    _, resident, shared, *_ = map(int, (_read(Path("/proc/self/statm")) or "0 0 0").split())
    return (resident - shared) * resource.getpagesize()


def most_resident() -> int:
    """Bytes that this process has had in memory at most, shared ones among them."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_threads() -> int | None:
    """Threads that may still be started here, those of new processes among them; None where nothing limits them."""
    found = []
    own = dict(line.split(":", 2)[1:] for line in (_read(Path("/proc/self/cgroup")) or "").splitlines())
    for group in (CGROUP / "pids" / own.get("pids", "/").lstrip("/"), CGROUP / own.get("", "/").lstrip("/"), CGROUP):
        most, now = _read(group / "pids.max"), _read(group / "pids.current")
        if most and now and most.isdecimal():
            found.append(int(most) - int(now))
    most_of_user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() and most_of_user != resource.RLIM_INFINITY:  # root may have any number
        found.append(most_of_user - _threads_of(os.geteuid()))
    return min(found, default=None)


def _threads_of(user: int) -> int:
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            count += len(os.listdir(process / "task")) if process.stat().st_uid == user else 0
    return count


def full_disk(folder: Path) -> str | None:
    """Where the disk of `folder` is so full that Ray stores nothing more on it, a sentence with the way out; else None."""
    usage, most = shutil.disk_usage(folder), float(os.environ.get(*FULL_AT))
    used = 1 - usage.free / usage.total if usage.total else 0.0  # some file systems say nothing
    if used < most:
        return None
    return (
        f"the disk of {folder} is {100 * used:.1f} % full, and Ray stores nothing more on one above {100 * most:g} %. "
        f"Free some space, set RAY_TMPDIR to a folder on another disk, or {FULL_AT[0]} to a larger share"
    )


def host_and_port(address: str) -> tuple[str, int] | None:
    """Of HOST:PORT; None of another address, as `auto`, which is no place."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    known = host and port.isascii() and port.isdecimal() and int(port) < 1 << 16
    return (host.strip("[]"), int(port)) if known else None


def not_joined(address: str) -> str | None:
    """Why Ray can join nothing at `address`, whatever runs there, as a clause with the way out; None where it may."""
    if address in ("auto", "local") or address.startswith("ray://") or host_and_port(address):
        return None
    return f"{address} is no address of a Ray cluster; write HOST:PORT, such as 10.0.0.1:6379"


def answers(address: str) -> bool:
    """Whether something listens at HOST:PORT; words such as `auto` are no places and pass."""
    if (place := host_and_port(address)) is None:
        return True
    try:
        socket.create_connection(place, timeout=3).close()
    except OSError:
        return False
    return True


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
