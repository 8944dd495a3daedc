"""Ray's workers as forks of one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from command import python

from raysim.engine.ray import forked

ON_RAY = """
import contextlib, os, sys
import numpy, psutil, ray
from raysim.engine.ray.cluster import own_cluster

@ray.remote(num_cpus=0)
class Actor:
    def __init__(self):
        self.draw = float(numpy.random.random())
    def seen(self):
        return {"parent": os.getppid(), "folder": os.getcwd(), "torch": "torch" in sys.modules, "draw": self.draw}
    def environment(self):
        return {key: value for key, value in os.environ.items() if key != "RAY_RUNTIME_ENV_CREATE_WORKING_DIR"}

def new(count):
    actors = [Actor.remote() for _ in range(count)]
    return actors, ray.get([actor.seen.remote() for actor in actors])

with own_cluster() as folder:
    [server] = [child for child in psutil.Process().children() if "serve" in child.cmdline()]
    four, seen = new(4)
    assert all(one["parent"] == server.pid and one["folder"] == os.getcwd() for one in seen), seen
    assert len({one["draw"] for one in seen}) == 4, seen
    older, _ = new(1)
    inherited = ray.get(older[0].environment.remote())
    ray.kill(four[0])
    with contextlib.suppress(ray.exceptions.RayActorError):
        while True:
            ray.get(four[0].seen.remote())
    ray.get([actor.seen.remote() for actor in four[1:]])  # Ray ends a worker with its process group
    assert server.status() != psutil.STATUS_ZOMBIE
    server.kill()
    server.wait()
    while "forks that wait for work are taken first":
        [youngest], [own] = new(1)
        if psutil.Process(own["parent"]).name() == "raylet":
            break
    assert inherited == ray.get(youngest.environment.remote())
    ray.get(older[0].seen.remote())
assert not folder.exists()
with own_cluster():
    _, seen = new(2)
    [server] = {psutil.Process(one["parent"]) for one in seen}
    forks = server.children()
assert not any(process.is_running() for process in (server, *forks))
"""


def test_on_ray(tmp_path: Path) -> None:
    """An actor is a fork, with the environment and folder that Ray would have given it; without a server it is a process
    of its own. At the end nothing is left."""
    script = python("-c", ON_RAY, folder=tmp_path)
    assert script.end() == 0, script.output


def test_a_process_with_threads_is_not_forked(tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    with socket.socket(socket.AF_UNIX) as listener:
        server = subprocess.run(
            [sys.executable, forked.__file__, "serve", str(listener.fileno()), "threads"],
            env=os.environ | {"PYTHONPATH": str(tmp_path)}, pass_fds=[listener.fileno()], text=True, capture_output=True,
            check=False,
        )  # fmt: skip
    assert server.returncode == 1
    assert "not forked: a thread runs after importing threads" in server.stderr


def test_a_worker_without_a_server_is_ray_s_own(tmp_path: Path) -> None:
    environment = os.environ | {forked.SERVER: str(tmp_path / "none")}
    worker = subprocess.run(
        [sys.executable, forked.__file__, "--some"], env=environment, text=True, capture_output=True, check=False
    )
    assert worker.returncode == 2
    assert "default_worker.py: error: the following arguments are required" in worker.stderr
