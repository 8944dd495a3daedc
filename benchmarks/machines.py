"""Several machines on one: namespaces of networks, processes and mounts on a bridge, each with a node of a Ray cluster.

    with Machines(4) as machines:
        machines.run(1, "raysim", "run", "quickstart", "--address", machines.address)

chaos.py and network.py use it. It needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

PORT = 6379  # of Ray's head
JOBS = 8265  # of its dashboard, to which jobs are submitted
READY_SECONDS = 120


def missing() -> str | None:
    """Why there can be no machines here, as a sentence; None where there can."""
    if os.getuid():
        return "network namespaces need root"
    absent = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if absent:
        return f"network namespaces need {' and '.join(absent)} (iproute2, util-linux)"
    probe = f"rsprobe{os.getpid()}"
    made = subprocess.run(["ip", "link", "add", probe, "type", "bridge"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "link", "del", probe], capture_output=True, check=False)
    return f"no bridge can be made: {made.stderr.strip()}" if made.returncode else None


class Machines:
    """`count` machines, the first of which is the head of a Ray cluster with a token. They share the cores and the file
    system, but for Ray's temporary files and /dev/shm; they see each other over a bridge only."""

    numbers = itertools.count(os.getpid() % 200)

    def __init__(self, count: int, cpus: int = 1, jobs: bool = False, rates: Mapping[int, str] | None = None):
        """`cpus` are those that Ray believes a machine has; with `jobs`, the head takes jobs. `rates` limit machines' links,
        each way, such as {3: "1gbit"}."""
        self.count, self.cpus, self.jobs, self.rates = count, cpus, jobs, dict(rates or {})
        number = next(self.numbers) % 250
        self.bridge, self.names = f"rsb{number}", [f"rs{number}-{i}" for i in range(count)]
        self.hosts = [f"10.213.{number}.{i + 1}" for i in range(count)]
        self.address, self.jobs_at = f"{self.hosts[0]}:{PORT}", f"http://{self.hosts[0]}:{JOBS}"

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="rs"))  # short: Ray's sockets are some folders below it
        self.token = self.folder / "token"
        self.token.touch(0o600)
        self.token.write_text(secrets.token_hex(32))
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_TMPDIR": str(self.folder / "r"),
            "RAY_worker_niceness": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
            "RAY_raylet_start_wait_time_s": "60",  # Ray's own 30 s are too few for a busy machine
            # A machine that cannot be reached for so long is dead.
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": "3",
        }
        self._inits: list[subprocess.Popen[str]] = []
        try:
            self._wire()
            for i in range(self.count):
                self._boot(i)
                self.start(i)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for init in self._inits:
            init.kill()  # and with it everything that runs there, as a power cut does
            init.wait()
        for i, name in enumerate(self.names):
            _ip("link", "del", f"{self.bridge}v{i}", check=False)  # sockets keep a namespace for a while, and its cable
            _ip("netns", "del", name, check=False)
        _ip("link", "del", self.bridge, check=False)
        shutil.rmtree(self.folder)

    def _wire(self) -> None:
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("link", "set", self.bridge, "up")
        for i, (name, host) in enumerate(zip(self.names, self.hosts, strict=True)):
            outside = f"{self.bridge}v{i}"
            _ip("netns", "add", name)
            _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", outside, "master", self.bridge)
            _ip("link", "set", outside, "up")
            _ip("-n", name, "addr", "add", f"{host}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
            if rate := self.rates.get(i):
                for end in (["-n", name, "qdisc", "add", "dev", "eth0"], ["qdisc", "add", "dev", outside]):
                    shape = ["root", "tbf", "rate", rate, "burst", "512kb", "latency", "50ms"]
                    subprocess.run(["tc", *end, *shape], check=True)

    def _boot(self, i: int) -> None:
        """Start the process whose end is that of machine i."""
        temporary = self.folder / "r"
        temporary.mkdir(exist_ok=True)
        mounts = f"mount -t tmpfs tmpfs {temporary} && mount -t tmpfs tmpfs /dev/shm && echo up && exec sleep infinity"
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", mounts]
        inside = ["ip", "netns", "exec", self.names[i], *apart]
        init = subprocess.Popen(inside, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._inits.append(init)
        assert init.stdout
        if init.stdout.readline() != "up\n":
            raise OSError(f"machine {i} does not come up")

    def start(self, i: int) -> None:
        """Start machine i's node of the cluster."""
        where = ["--head", f"--port={PORT}"] if i == 0 else [f"--address={self.address}"]
        jobs = [f"--include-dashboard={str(self.jobs).lower()}", "--dashboard-host=0.0.0.0"] if i == 0 else []
        command = [
            "ray", "start", *where, *jobs, f"--node-ip-address={self.hosts[i]}", f"--num-cpus={self.cpus}", "--num-gpus=0",
            f"--object-store-memory={600 << 20}", "--disable-usage-stats",
        ]  # fmt: skip
        try:
            self.run(i, *command, timeout=READY_SECONDS)
        except RuntimeError:  # a busy machine may be too slow for Ray's patience
            self.run(i, "ray", "stop", "--force")
            self.run(i, *command, timeout=READY_SECONDS)

    @staticmethod
    def program(name: str | Path) -> str:
        """The program of this Python's environment, where that has it."""
        program = Path(sys.executable).with_name(str(name))
        return str(program) if program.exists() else str(name)

    def popen(self, i: int, *command: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a command on machine i. Programs are those of this Python's environment."""
        words = [self.program(command[0]), *map(str, command[1:])]
        environment = self.environment | options.pop("env", {})
        parent = self._inits[i].pid
        [init] = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        inside = ["nsenter", "-t", init, "-n", "-p", "-m", f"--wd={options.pop('cwd', self.folder)}"]
        return subprocess.Popen(
            [*inside, *words], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, **options,
        )  # fmt: skip

    def run(self, i: int, *command: str | Path, timeout: float = 600, **options: Any) -> str:
        """Run a command on machine i and return what it printed. Raises RuntimeError with that if it fails."""
        with self.popen(i, *command, **options) as process:
            try:
                said, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said, _ = process.communicate()
                raise RuntimeError(f"{command} did not end within {timeout:g} s:\n{said}") from None
        if process.returncode:
            raise RuntimeError(f"{command} ended with {process.returncode}:\n{said}")
        return said

    def link(self, i: int, up: bool) -> None:
        """Pull machine i's cable, or plug it in again."""
        _ip("link", "set", f"{self.bridge}v{i}", "up" if up else "down")

    def sent(self) -> list[int]:
        """Bytes that each machine has sent to others."""
        # What comes out of a machine arrives at the bridge's end of its cable.
        return [
            int(Path("/sys/class/net", f"{self.bridge}v{i}", "statistics/rx_bytes").read_text())
            for i in range(self.count)
        ]


def _ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
