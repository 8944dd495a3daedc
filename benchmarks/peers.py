"""raysim beside Flower's simulation, Apple's pfl-research and BlazeFL: seconds a round, to start, and memory, in turns in one
run.

    python benchmarks/peers.py --envs FOLDER [--workloads W1 W2 W3] [--rounds 9] [--peers flower pfl blazefl]

The workloads are those of benchmarks/rounds.py. Every simulator gets the same clients with the same samples, the same
first model, and as many training processes of one thread as there are CPUs; its script is in benchmarks/peers/. The others
live in environments of their own under FOLDER, made where they are not there, with this environment's PyTorch. BlazeFL, whose
clients are threads, gets the newest Python on the PATH, best one without a global lock (python3.14t). Unless all
models have learned the same, nothing is reported. A result is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rounds import LR, SEED, WORKLOADS, Workload, configuration, descendants, pss
from torch import Tensor, nn

from raysim.config.identity import to_yaml
from raysim.federation import Federation
from raysim.store.manifest import manifest

SCRIPTS = Path(__file__).parent / "peers"
OWN = {  # what an environment of its own is made of
    "flower": "flwr[simulation]", "pfl": "pfl[pytorch]", "blazefl": "blazefl[contrib,reproducibility]",
}  # fmt: skip
NEWEST = ("python3.14t", "python3.14", "python3.13", "python3.12")  # of which BlazeFL needs one
PACKAGES = ("raysim", "flwr", "pfl", "blazefl", "torch", "numpy", "ray")  # whose versions are recorded
ALIKE = {
    "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RAY_worker_niceness": "0",  # or Ray's actors would yield
    "FLWR_TELEMETRY_ENABLED": "0", "PFL_PYTORCH_DEVICE": "cpu",
}  # fmt: skip
PATIENCE = 300  # seconds for a start or a round
JUDGED = 5000  # samples whose training loss is compared
LEEWAY = 0.1  # share by which the loss may fall further or less than raysim's: others draw other clients and batches


class Refused(Exception):
    """There is nothing to compare; the message says why."""


# ---- environments ----------------------------------------------------------------------------------------------------


def variables(name: str) -> dict[str, str]:
    """The environment variables of a simulator: no cluster to join, and no path to what is not its own."""
    foreign = {"RAY_ADDRESS", *(["PYTHONPATH"] if name in OWN else [])}
    return {key: value for key, value in os.environ.items() if key not in foreign} | ALIKE


def versions(name: str, python: str) -> dict[str, str]:
    """Of the packages that the simulator's script can import; none if it cannot. Its files are in memory afterwards."""
    code = f"import with_{name}, importlib.metadata as m, json; print(json.dumps({{d.name: d.version for d in m.distributions()}}))"
    found = subprocess.run([python, "-c", code], cwd=SCRIPTS, env=variables(name), stdout=subprocess.PIPE, text=True)
    packages = json.loads(found.stdout.splitlines()[-1]) if found.returncode == 0 else {}
    return {package: packages[package] for package in PACKAGES if package in packages}


def interpreter(name: str) -> str:
    """The Python of which a simulator's environment is made. Raises `Refused`."""
    if name != "blazefl":
        return sys.executable
    for python in NEWEST:
        with suppress(OSError):
            if subprocess.run([python, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0:
                return python
    raise Refused(
        f"BlazeFL needs Python 3.12 or later: put {', '.join(NEWEST)} on the PATH, or leave it out (--peers)."
    )


def environment(name: str, folder: Path) -> tuple[str, dict[str, str]]:
    """The simulator's Python and its versions. It is made in the folder, if it is not there."""
    if name not in OWN:
        return sys.executable, versions(name, sys.executable)
    python = str(folder / name / "bin" / "python")
    if not Path(python).exists():
        print(f"making {folder / name}: {OWN[name]}", flush=True)
        subprocess.run([interpreter(name), "-m", "venv", str(folder / name)], check=True)
        kernels = f"torch=={torch.__version__.partition('+')[0]}"
        subprocess.run([python, "-m", "pip", "install", "-q", OWN[name], kernels], check=True)
    found = versions(name, python)
    if not found:
        raise Refused(f"{name} does not work in {folder / name}. Remove that folder, and it is made anew.")
    return python, found


# ---- what all are given ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """A workload's samples, client by client, and the model that every simulator begins with."""

    work: Workload
    model: nn.Module
    x: Tensor
    y: Tensor
    seed: int

    @classmethod
    def of(cls, work: Workload, seed: int = SEED) -> Given:
        with tempfile.TemporaryDirectory() as folder:
            federation = Federation(configuration(work, "local", seed=seed), Path(folder))
            federation.close()
        shards = [federation.partition.train[client] for client in range(work.clients)]
        assert {len(shard) for shard in shards} == {work.samples}
        rows = np.concatenate(shards)
        x = federation.data.transform(torch.from_numpy(federation.data.x[rows]))
        layers = [module for module in federation.model().train().modules() if not list(module.children())]
        return cls(work, nn.Sequential(*layers), x, torch.from_numpy(federation.data.y[rows]), seed)

    def lay_out(self, name: str, folder: Path, processes: int) -> None:
        """Write what the simulator's script reads; a copy for each, so that memory is not shared among them."""
        folder.mkdir()
        if name not in OWN:
            engine = {"ray": {"clients_per_actor": -(-self.work.cohort // processes), "gpu_per_client": 0}}
            (folder / "config.yaml").write_text(to_yaml(configuration(self.work, engine, seed=self.seed)))
            return
        np.save(folder / "x.npy", self.x.numpy())
        np.save(folder / "y.npy", self.y.numpy())
        torch.save(self.model, folder / "model.pt")
        numbers = {key: getattr(self.work, key) for key in ("clients", "cohort", "samples", "batch")}
        (folder / "work.json").write_text(json.dumps(numbers | {"lr": LR, "processes": processes, "seed": self.seed}))

    def loss(self, parameters: Sequence[np.ndarray] | None = None) -> float:
        """Mean training loss of the model, with these parameters or its first ones."""
        with torch.no_grad():
            if parameters is not None:
                for ours, theirs in zip(self.model.parameters(), parameters, strict=True):
                    ours.copy_(torch.from_numpy(theirs))
            return F.cross_entropy(self.model(self.x[:JUDGED]), self.y[:JUDGED]).item()


# ---- simulators ------------------------------------------------------------------------------------------------------


@dataclass
class Simulator:
    """A simulator's script at work: it waits for its turns, and runs a round in each."""

    name: str
    python: str
    folder: Path  # with what it is given
    seconds: list[float] = field(default_factory=list)  # of every round
    start_seconds: float = 0.0  # from the command to the first round's begin
    first_round_ends: float = 0.0  # seconds from the command
    processes: int = 0
    pss_bytes: int = 0
    parameters: Sequence[np.ndarray] = ()  # which the last round left
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _lines: list[Connection] = field(default_factory=list)

    def start(self, rounds: int, processes: int) -> None:
        """Give the command, and run the first round."""
        begun = time.perf_counter()
        self._launch(rounds, processes)
        self._hear()
        self.start_seconds = time.perf_counter() - begun
        self.simulate()
        self.first_round_ends = time.perf_counter() - begun

    def simulate(self) -> None:
        """Run a round, while the others wait."""
        begun = time.perf_counter()
        for line in self._lines:
            line.send(None)
        self._hear()
        self.seconds.append(time.perf_counter() - begun)

    def measure(self) -> None:
        """Count its processes, those of its Ray too, and their memory."""
        tree = [pid for one in self._started for pid in (one.pid, *descendants(one.pid))]
        self.processes, self.pss_bytes = len(tree), pss(tree)

    def close(self) -> None:
        for one in self._started:
            with suppress(subprocess.TimeoutExpired):
                one.wait(timeout=30 if len(self.parameters) else 0)
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)  # Ray's own processes end when their driver has
        for line in self._lines:
            line.close()

    def _launch(self, rounds: int, processes: int) -> None:
        """pfl is started once for each of its training processes; the others start theirs themselves."""
        ranks = processes if self.name == "pfl" else 1
        addresses = ",".join(f"127.0.0.1:{free_port()}" for _ in range(ranks))
        for rank in range(ranks):
            ours, theirs = Pipe()
            self._lines.append(ours)
            own = {
                "PEERS_FOLDER": str(self.folder), "PEERS_ROUNDS": str(rounds), "PEERS_LINE": str(theirs.fileno()),
                "PFL_WORKER_RANK": str(rank), "PFL_WORKER_ADDRESSES": addresses,
            }  # fmt: skip
            with (self.folder / "log.txt").open("ab") as log, theirs:
                self._started.append(
                    subprocess.Popen(
                        [self.python, str(SCRIPTS / f"with_{self.name}.py")], env=variables(self.name) | own,
                        pass_fds=[theirs.fileno()], stdout=log, stderr=log, start_new_session=True,
                    )
                )  # fmt: skip

    def _hear(self) -> None:
        """Wait until all its processes have ended what they do."""
        silent, until = set(self._lines), time.monotonic() + PATIENCE
        while silent:
            heard = wait(list(silent), timeout=until - time.monotonic())
            if not heard:
                raise Refused(f"{self.name} took longer than {PATIENCE} s.\n{self._last_words()}")
            for line in heard:
                assert isinstance(line, Connection)
                try:
                    self.parameters = line.recv() or ()
                except (EOFError, ConnectionError):
                    raise Refused(f"{self.name} ended before its turn.\n{self._last_words()}") from None
                silent.remove(line)

    def _last_words(self) -> str:
        return "\n".join((self.folder / "log.txt").read_text(errors="replace").splitlines()[-20:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- measuring -------------------------------------------------------------------------------------------------------


def check(before: float, after: Mapping[str, float]) -> None:
    """Refuse to compare simulators whose models have not learned what raysim's has: then they did other work."""
    ours = before - after["raysim"]
    if ours <= 0:
        raise Refused(f"raysim's training loss did not fall: {before:.4f} before, {after['raysim']:.4f} after.")
    for name, loss in after.items():
        if not abs((before - loss) / ours - 1) <= LEEWAY:
            raise Refused(
                f"{name} does not do raysim's work: from {before:.4f}, the training loss falls to {loss:.4f} with it, and to "
                f"{after['raysim']:.4f} with raysim."
            )


def contest(given: Given, pythons: Mapping[str, str], rounds: int, processes: int) -> dict[str, dict[str, Any]]:
    """Run the rounds in turns: what disturbs one disturbs all."""
    with tempfile.TemporaryDirectory() as folder:
        simulators = [Simulator(name, python, Path(folder) / name) for name, python in pythons.items()]
        try:
            for one in simulators:
                given.lay_out(one.name, one.folder, processes)
            for one in simulators:
                one.start(rounds, processes)
            for t in range(1, rounds):
                if t == rounds - 1:
                    for one in simulators:
                        one.measure()
                for one in simulators:
                    one.simulate()
        finally:
            for one in simulators:
                one.close()
    before, after = given.loss(), {one.name: given.loss(one.parameters) for one in simulators}
    check(before, after)
    ours = simulators[0].seconds[1:]
    return {
        one.name: {
            "seconds": statistics.median(one.seconds[1:]), "quartiles": statistics.quantiles(one.seconds[1:]),
            "min": min(one.seconds[1:]),
            "to_raysim": statistics.median(a / b for a, b in zip(one.seconds[1:], ours, strict=True)),
            "start_seconds": one.start_seconds, "first_round_ends_seconds": one.first_round_ends,
            "processes": one.processes, "pss_bytes": one.pss_bytes, "loss": {"before": before, "after": after[one.name]},
        }
        for one in simulators
    }  # fmt: skip


def show(name: str, result: Mapping[str, Mapping[str, Any]]) -> None:
    for simulator, r in result.items():
        print(f"{name:4}{simulator:8}{r['seconds']:9.3f}{r['to_raysim']:9.2f}{r['start_seconds']:9.1f}"
              f"{r['first_round_ends_seconds']:9.1f}{r['processes']:7}{r['pss_bytes'] / 2**20:7.0f}"
              f"{r['loss']['after']:9.4f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, required=True)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--peers", nargs="+", choices=OWN, default=list(OWN))
    parser.add_argument("--rounds", type=int, default=9, help="of W1 and W2; three times as many of W3")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if args.rounds < 3:
        parser.error("--rounds: the first is not counted, and two are needed for quartiles; at least 3")
    torch.set_num_threads(1)
    results = {}
    try:
        pythons, found = {}, {}
        for name in ("raysim", *args.peers):
            pythons[name], found[name] = environment(name, args.envs.absolute())
            print(name, found[name], flush=True)
        print(f"{'':12}{'s/round':>9}{'/ raysim':>9}{'start s':>9}{'round 1':>9}{'procs':>7}{'MiB':>7}{'loss':>9}")
        for name in args.workloads:
            rounds = args.rounds * (3 if name == "W3" else 1)
            results[name] = contest(Given.of(WORKLOADS[name]), pythons, rounds, args.processes)
            show(name, results[name])
    except Refused as refusal:
        sys.exit(str(refusal))
    out = SCRIPTS.with_name("results") / f"peers-{time.strftime('%Y-%m-%dT%H%M')}.json"
    measured = {"command": " ".join(sys.argv), "environments": found, "machine": manifest("", SEED, {})}
    out.write_text(json.dumps(measured | {"results": results}, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
