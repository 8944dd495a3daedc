"""Ray's workers on this machine as forks of one process, the server, that has imported what takes seconds. A fork starts in a
fifth of the CPU time, and shares its libraries' memory with the others.

Ray is given this file in place of its own worker's script. Run by Ray, it asks the server for a fork that becomes the worker, and
ends; where no server answers, it becomes the worker itself. It imports nothing of raysim's, and little else, because it runs
whenever a worker starts. `python forked.py serve FD MODULE...` is the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress

SERVER = "RAYSIM_FORK_SERVER"  # in the environment of Ray's processes: the server's socket
WAIT = 60.0  # seconds for an answer: the server may still be importing, on a busy machine
LENGTH = 8  # bytes that say how long a request is
GO = b"1"


def serve(listener: socket.socket, modules: list[str]) -> socket.socket | None:
    """Import the modules, then fork for everyone who connects. Returns the connection in each fork, and None in the server
    when the process that started it has ended, which holds the other end of its input; no fork is left then. A fork of a
    process with threads may hang: where a module has started one, the server ends at once."""
    import gc
    import importlib
    import select

    for name in modules:
        with suppress(ImportError):
            importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit(f"Ray's workers are not forked: a thread runs after importing {', '.join(modules)}")
    gc.collect()
    gc.freeze()  # the collector would copy every page that it marks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork that ends stays behind as a zombie
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            with suppress(OSError):  # no such file; and at last, no child is left
                with open(f"/proc/self/task/{os.getpid()}/children") as children:
                    for fork in children.read().split():
                        os.kill(int(fork), signal.SIGKILL)
                os.wait()
            return None
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return connection
        connection.close()


def become(connection: socket.socket) -> None:
    """Be the worker that is asked for here, with its arguments, environment, working directory and output."""
    import runpy

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)  # Ray ends a worker with its process group
    try:
        length, descriptors, _, _ = socket.recv_fds(connection, LENGTH, 3)
        arguments, environment, folder = json.loads(_receive(connection, int.from_bytes(length)))
        connection.sendall(GO)
        _receive(connection, len(GO))
    except (OSError, ValueError):  # Ray has ended the other side; or that has lost patience, and is the worker itself
        os._exit(0)
    connection.close()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # else all forks draw the same; `random` sees to this itself
    script = _rays_own()
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


def ask(arguments: list[str]) -> bool:
    """Whether the server has forked a worker with these arguments and this process's environment, folder and output."""
    request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT)
        connection.connect(os.environ[SERVER])
        socket.send_fds(connection, [len(request).to_bytes(LENGTH)], [0, 1, 2])
        connection.sendall(request)
        _receive(connection, len(GO))
        connection.sendall(GO)
        return True
    return False


def _receive(connection: socket.socket, length: int) -> bytes:
    content = b""
    while len(content) < length:
        if not (more := connection.recv(length - len(content))):
            raise ConnectionError("the other side has ended")
        content += more
    return content


def _rays_own() -> str:
    from importlib.util import find_spec

    ray = find_spec("ray")
    assert ray and ray.origin
    return os.path.join(os.path.dirname(ray.origin), "_private", "workers", "default_worker.py")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        if connection := serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:]):
            become(connection)
    elif not ask(sys.argv[1:]):
        os.execv(sys.executable, [sys.executable, _rays_own(), *sys.argv[1:]])
