"""The report of runs that still grow, served to a browser on this machine."""

from __future__ import annotations

import html
import secrets
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from raysim.clock import CLOCK, Clock
from raysim.report import ReportError, need
from raysim.report.page import write
from raysim.report.runs import find
from raysim.store.documents import DamagedFile

SHARE = 0.05  # of one core's time, at most, goes into drawing: the runs need it


class Watch:
    """The page of the runs that `folders` are or hold, drawn again when they have grown; `every` so many seconds a browser
    asks for it."""

    def __init__(self, folders: Sequence[Path], every: float, clock: Clock = CLOCK):
        need("matplotlib.figure", "jinja2")
        self.folders, self.every, self._clock = folders, every, clock
        self._lock = threading.Lock()
        self._drawn: tuple[object, str] | None = None  # what the page was drawn of
        self._next = 0.0  # no earlier than then it is drawn again

    def page(self) -> tuple[str, bool]:
        """The page, and whether it may change."""
        with self._lock:
            try:
                return self._page()
            except (ReportError, DamagedFile, OSError) as error:  # a run may be removed while it is read
                return _sentence(error), True

    def _page(self) -> tuple[str, bool]:
        runs = find(self.folders)
        grown = [(str(run.folder), _written(run.folder)) for run in runs]
        alive = any(run.state == "running" for run in runs)
        if self._drawn is None or (grown != self._drawn[0] and self._clock.now() >= self._next):
            began = self._clock.now()
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder, "report.html")
                write(runs, out)
                self._drawn = grown, out.read_text(encoding="utf-8")
            self._next = self._clock.now() + (self._clock.now() - began) / SHARE
        return self._drawn[1], alive or grown != self._drawn[0]


def _sentence(error: Exception) -> str:
    """A page that says why there is nothing to show."""
    return f"<!doctype html><meta charset=utf-8><title>raysim</title><p>{html.escape(str(error))}"


def _written(folder: Path) -> tuple[int, ...]:
    """Changes whenever the run has written something that a page shows."""
    paths = [folder / name for name in ("rounds", "result.json", "label.json", "measures")]
    return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in paths)


@contextmanager
def serving(watch: Watch, port: int = 0) -> Iterator[str]:
    """Serve the page on the loopback interface; yields its address, which other users of the machine cannot guess. Port 0
    is any that is free. Raises OSError where the port is taken."""
    secret = f"/{secrets.token_urlsafe(16)}/"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not secrets.compare_digest(self.path.encode(), secret.encode()):
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            text, may_change = watch.page()
            body = text.encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            if may_change:
                self.send_header("Refresh", f"{watch.every:g}")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{secret}"
        finally:
            server.shutdown()
