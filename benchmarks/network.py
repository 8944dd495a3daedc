"""Three machines with a network between them, of which one is slow (see machines.py; needs root):

    python benchmarks/network.py

- `job`: the head runs a job that another machine has submitted. It has the bits of one process, and what the machines send is
  counted by the kernel, in models: the head sends two of them a round to each neighbour, the global one and the mean from which
  FedLWS measures; a neighbour sends two sums, and hands on what it has merged of the others'.
- `alone`: a machine starts a cluster of its own, with which no other one can speak.
- `link`: a machine's link goes down in a round. The run ends with the bits of one process, and says so.

Exit code 1 where that is not so. The numbers go to benchmarks/results/.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from machines import PORT, Machines, missing

import raysim
from raysim.store import tables

JOB: dict[str, Any] = {
    "name": "resnet",
    "seed": 3,
    "data": {
        "name": {"synthetic": {"samples": 24, "test_samples": 8, "shape": [3, 32, 32], "classes": 4}},
        "partition": {"iid_equal": {"clients": 6}},
    },
    "model": {"name": "resnet18"},
    "rounds": {"total": 1},  # later shares follow the speed of the machines, which here is chance
    "local": {"batch_size": 4, "lr": 0.01},
    "server": ["fedlws"],
    "engine": {"ray": {"clients_per_actor": 2}},
}
MODEL = 11_173_962 * 4  # bytes of a ResNet-18 for ten classes, to a thousandth
LINK: dict[str, Any] = {
    "name": "link",
    "data": {
        "name": {"synthetic": {"samples": 1600, "shape": [1, 8, 8], "classes": 4}},
        "partition": {"dirichlet_counts": {"alpha": 0.8, "clients": 8, "min_size": 6}},
    },
    "model": {"name": "tiny_bn_cnn"},
    "rounds": {"total": 4, "participation": 0.4, "checkpoint_every": 2},
    "local": {"batch_size": 8, "lr": 0.1, "epochs": 4},
    "client": ["scaffold"],
    "engine": {"ray": {"clients_per_actor": 1}},
}


LISTENS = """
import json, psutil, sys
from raysim.engine.ray.cluster import cluster
with cluster():
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = [one for process in processes for one in process.net_connections("tcp") if one.status == "LISTEN"]
    print(json.dumps(sorted({one.laddr.port for one in found})), flush=True)
    sys.stdin.read()
"""
CONNECTS = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), 5).close()
        print("open")
    except ConnectionRefusedError:
        print("refused")
"""


def sha256(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["sha256"])


def local(config: dict[str, Any], folder: Path) -> str:
    """The hash of the run in one process."""
    return str(raysim.run(config | {"engine": "local"}, out=folder, progress=False).result["sha256"])


def job(machines: Machines, folder: Path) -> dict[str, Any]:
    (folder / "job").mkdir()
    (folder / "job/resnet.yaml").write_text(yaml.safe_dump(JOB))
    command = ["ray", "job", "submit", "--address", machines.jobs_at, "--working-dir", folder / "job"]
    before = machines.sent()
    machines.run(1, *command, "--", machines.program("raysim"), "run", "resnet.yaml", "--out", folder / "job-run")
    sent = [(after - first) / MODEL for first, after in zip(before, machines.sent(), strict=True)]
    rounds, sums, others = 1, 2, 2
    needed = others * rounds * 2  # the model and the mean of each round
    return {
        "same bits": sha256(folder / "job-run") == local(JOB, folder / "job-local"),
        "models sent": [round(models, 2) for models in sent],
        # The last model is tested wherever there is work, and a part of the clients may be merged elsewhere.
        "the head sends what is needed": needed <= sent[0] <= needed + others + rounds * sums + 0.3,
        # Each of the others sends a sum, and what is merged is handed on once; the clients' models would be eight.
        "the others send sums": rounds * sums * others <= sent[1] + sent[2] <= rounds * sums * (others + 1) + 0.3,
    }


def alone(machines: Machines, folder: Path) -> dict[str, Any]:
    with machines.popen(0, "python", "-c", LISTENS, stdin=subprocess.PIPE) as process:
        assert process.stdout
        ports = json.loads(next(line for line in process.stdout if line.startswith("[")))
        called = [str(port) for port in (PORT, *ports)]  # the first is the head's, which all may reach
        answers = machines.run(1, "python", "-c", CONNECTS, machines.hosts[0], *called).split()
        process.communicate("")
    return {"ports": len(ports), "none answers": answers == ["open", *["refused"] * len(ports)]}


def link(machines: Machines, folder: Path) -> dict[str, Any]:
    (folder / "link.yaml").write_text(yaml.safe_dump(LINK))
    command = ["raysim", "run", folder / "link.yaml", "--address", machines.address, "--out", folder / "link-run"]
    with machines.popen(0, *command) as process:
        assert process.stdout
        began = any(line.startswith("round 2/4") for line in process.stdout)
        machines.link(2, up=False)
        said = process.stdout.read()
        code = process.wait()
    machines.link(2, up=True)
    if code:
        return {"ends": False, "said": said}
    messages = tables.read(folder / "link-run", "events")["message"].to_pylist()
    rows = tables.read(folder / "link-run", "clients").to_pylist()
    return {
        "ends": began,
        "same bits": sha256(folder / "link-run") == local(LINK, folder / "link-local"),
        "it is said": len(messages) == 1 and "its node is gone" in messages[0],
        "machines": [len({row["node"] for row in rows if row["round"] == t}) for t in (0, 3)],
    }


def main() -> None:
    if reason := missing():
        raise SystemExit(reason)
    found = {}
    with tempfile.TemporaryDirectory() as place, Machines(3, jobs=True, rates={2: "1gbit"}) as machines:
        for check in (job, alone, link):
            found[check.__name__] = check(machines, Path(place))
            print(check.__name__, found[check.__name__])
    out = Path(__file__).parent / "results" / f"network-{time.strftime('%Y-%m-%dT%H%M')}.json"
    out.write_text(json.dumps(found, indent=2) + "\n")
    print(out)
    if any(value is False for check in found.values() for value in check.values()) or found["link"]["machines"] != [
        3,
        2,
    ]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
