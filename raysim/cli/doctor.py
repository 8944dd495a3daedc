"""What this machine has, and what of it would keep a simulation from running well: `raysim doctor`."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import typer

from raysim.machine import answers, cpu_quota, full_disk, host_and_port, memory_bytes, not_joined

PACKAGES = ("raysim", "ray", "torch", "torchvision", "numpy", "pyarrow", "safetensors", "pydantic")
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report. `problem` says what is wrong and what to do."""

    topic: str
    text: str
    problem: str | None = None


def examine() -> Iterator[Finding]:
    """All findings, cheapest first."""
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    yield _packages()
    yield _cpus()
    yield _memory()
    yield _shared_memory()
    yield _disk()
    yield _data()
    yield from _gpus()
    yield _ray()


def _packages() -> Finding:
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    missing = [p for p in PACKAGES[1:] if p not in found]
    problem = f"{', '.join(missing)} not installed. Installing raysim with pip brings them along." if missing else None
    if "torch" in found and "torchvision" in found:
        needs = next((r for r in requires("torchvision") or () if re.match(r"torch\b", r)), "")
        pinned = re.search(r"==([\d.]+)", needs)
        if pinned and found["torch"].split("+")[0] != pinned[1]:
            pair = f"torchvision {found['torchvision']} is made for torch {pinned[1]}, not {found['torch']}"
            problem = f"{pair}. Install both in one pip command."
    return Finding("packages", ", ".join(f"{name} {number}" for name, number in found.items()), problem)


def _cpus() -> Finding:
    total = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    quota = cpu_quota()
    limits = [f"{allowed} allowed to this process"] if allowed < total else []
    limits += [f"{quota:g} by the container's limit"] if quota is not None else []
    problem = None
    if quota is not None and quota < 1:
        problem = f"the container may use {quota:g} of a CPU, so all will be slow. Raise its limit (docker: --cpus)."
    return Finding("cpus", f"{total}" + (f" ({', '.join(limits)})" if limits else ""), problem)


def _memory() -> Finding:
    if (found := memory_bytes()) is None:
        return Finding("memory", "unknown on this system")
    total, available, limited = found
    note = " (the container's limit)" if limited else ""
    problem = None
    if available < 2 * GIB:
        need = "a Ray cluster and two actors want 2 GiB"
        problem = f"{_gib(available)} of memory are free; {need}. Close programs, or use engine: local."
    return Finding("memory", f"{_gib(available)} free of {_gib(total)}{note}", problem)


def _shared_memory() -> Finding:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Finding("/dev/shm", "none; Ray uses ordinary files")
    usage = shutil.disk_usage(shm)
    problem = None
    if usage.total < GIB:
        problem = f"/dev/shm has {_gib(usage.total)}; Ray falls back to slow files. Enlarge it (docker: --shm-size=4g)."
    elif usage.free < GIB / 2:
        problem = f"/dev/shm has {_gib(usage.free)} left. Stop what fills it: other Ray clusters, or files in it."
    return Finding("/dev/shm", f"{_gib(usage.free)} free of {_gib(usage.total)}", problem)


def _disk() -> Finding:
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    if not folder.is_dir():
        return Finding("disk", f"{folder} is missing", f"{folder} does not exist. Create it, or unset RAY_TMPDIR.")
    usage = shutil.disk_usage(folder)
    problem = f"{full}." if (full := full_disk(folder)) else None
    return Finding("disk", f"{_gib(usage.free)} free of {_gib(usage.total)} in {folder}", problem)


def _data() -> Finding:
    root = os.environ.get("RAYSIM_DATA")
    if not root:
        return Finding("data", "RAYSIM_DATA is not set; data.root decides")
    problem = None if Path(root).is_dir() else f"RAYSIM_DATA is {root}, which is not a folder. Correct or unset it."
    return Finding("data", f"RAYSIM_DATA is {root}", problem)


def _gpus() -> Iterator[Finding]:
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    try:
        import torch
    except ImportError as error:
        yield Finding("gpus", "unknown without torch", f"torch cannot be imported ({error}). Install it again.")
        return
    if not torch.cuda.is_available():
        problem = None
        if driver and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            cannot = f"there is an NVIDIA driver, but torch {torch.__version__} ({build}) cannot use it"
            problem = f"{cannot}. Install a build that fits the driver."
        yield Finding("gpus", "none; clients train on CPUs", problem)
        return
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        try:
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            yield Finding(f"gpu {index}", name, f"GPU {index} does not answer ({reason}). See nvidia-smi.")
            continue
        problem = f"GPU {index} has {_gib(free)} left. See nvidia-smi for who uses it." if free < GIB else None
        yield Finding(f"gpu {index}", f"{name}, {_gib(free)} free of {_gib(total)}", problem)


def _ray() -> Finding:
    address = os.environ.get("RAY_ADDRESS")
    problem = None
    if address and (fault := not_joined(address)):
        problem = f"RAY_ADDRESS: {fault}, or unset it."
    elif address and not answers(address):
        problem = f"nothing answers at {address}. Start the cluster, or unset RAY_ADDRESS."
    if problem:
        return Finding("ray", f"RAY_ADDRESS is {address}", problem)
    try:
        from raysim.engine.ray.cluster import cluster_address
    except ImportError as error:
        return Finding("ray", "cannot be imported", f"ray cannot be imported ({error}). Install ray[default] again.")
    if address and not host_and_port(address):
        return Finding("ray", f"RAY_ADDRESS is {address}, which was not tried; Ray looks for it when a run starts")
    found = cluster_address()
    local = "no cluster found; each run starts a local one and stops it"
    return Finding("ray", f"cluster found at {found}" if found else local)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def doctor() -> None:
    """Check this machine: versions, CPUs, memory, GPUs, cluster; say what is wrong and what to do."""
    raise typer.Exit(0 if report() else 1)


def report() -> bool:
    """Print all findings, then what is wrong and what to do; whether all is well."""
    problems = []
    for finding in examine():
        print(f"{finding.topic:<9} {finding.text}", flush=True)
        problems += [finding.problem] if finding.problem else []
    print("\nNothing is wrong." if not problems else f"\n{len(problems)} problem{'s' * (len(problems) > 1)}:")
    for problem in problems:
        print(f"- {problem}")
    return not problems
