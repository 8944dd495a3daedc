"""The manifest of a run: the versions, hardware and hashes that decide its bits and its speed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from raysim.store.documents import OPEN_SHAPE, DamagedFile, read_json

_PACKAGES = ("raysim", "torch", "torchvision", "ray", "numpy", "pyarrow", "safetensors")
SWITCHES = (  # environment variables by which libraries choose kernels; raysim itself sets how many threads they have
    "ONEDNN_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS", "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA", "DNNL_CPU_ISA_HINTS", "DNNL_DEFAULT_FPMATH_MODE",  # oneDNN's former name
    "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "MKL_DISABLE_FAST_MM", "MKL_NUM_STRIPES",
    "TORCH_MKLDNN_MATMUL_MIN_DIM", "TORCH_MKLDNN_MATMUL_MIN_SIZE", "TORCH_LINEAR_FLATTEN_3D",
    "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "GLIBC_TUNABLES",
)  # fmt: skip
DATA = "data.json"  # in the folder of a run: what one must know of the data to use its model
FAILED = "failed.txt"  # in the folder of a run that ended with an error: its message


class DamagedManifest(DamagedFile):
    """A run's manifest cannot be read."""


class DataForm(TypedDict, total=False):
    """What `data.json` says; the numbers where samples are not tokens, and the words where they are."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    shape: list[int]  # of a sample
    classes: list[str]
    scale: float
    mean: list[float]
    std: list[float]
    words: list[str]


class Recorded(TypedDict):
    """What a manifest says of a model, method, data set and so on that is not raysim's own. See `raysim.store.code`."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    kind: str
    name: str
    file: str | None  # in which it was defined, as an import finds it
    sha256: str | None  # of the text; None where the source could not be had
    text: str | None  # the file in the run's folder that has it
    given: bool  # whether as an object


class Manifest(TypedDict, total=False):
    """What others read of `manifest.json`; it may be absent in a run of an older raysim."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    config_hash: str
    seed: int
    versions: dict[str, str]
    hardware: dict[str, Any]
    data_sha256: str
    files_sha256: str | None
    partition_sha256: str
    samples: int
    unused_samples: int
    given_sha256: dict[str, str]
    init_sha256: str | None  # of an older raysim
    device: str
    numerics: dict[str, Any]
    loss_unit: str
    settings: dict[str, Any]
    code: list[Recorded]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the run in `folder`, empty where none has been written yet. Raises `DamagedManifest`."""
    path = folder / "manifest.json"
    try:
        return dict(read_json(path, Manifest)) if path.exists() else {}
    except DamagedFile as error:
        raise DamagedManifest(f"{error} It says what the run began with: put it back, or start another run.") from None


def lost(folder: Path) -> str:
    """A sentence for a run that cannot do without its manifest, and has none."""
    path = folder / "manifest.json"
    return f"{path} is missing or damaged: it says with what settings the run began. Put it back, or start another run."


def manifest(config_hash: str, seed: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a run's bits and speed besides its configuration, as JSON. It names no host, user or path."""
    import torch

    versions: dict[str, str] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__  # with its build, which the package's metadata leaves out
    return {
        "config_hash": config_hash,
        "seed": seed,
        "versions": versions,
        "hardware": {
            "os": platform.platform(),
            **kernels(),
            "switches": switches(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": _gpus(),
        },
        **extra,
    }


def kernels() -> dict[str, Any]:
    """The CPU by which kernels are chosen here, and so low bits."""
    import torch

    return {"cpu": _cpu(), "cpu_capability": torch.backends.cpu.get_cpu_capability()}


def switches(names: Sequence[str] = SWITCHES) -> dict[str, str | None]:
    """What the environment of this process has under these names; None where that is nothing."""
    return {name: os.environ.get(name) for name in names}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _gpus() -> list[str]:
    """Names and driver versions. torch does not know them: Ray hides GPUs from a driver process that has claimed none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in output.splitlines() if line.strip()]
