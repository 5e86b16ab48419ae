"""Serves the report of runs that go on to browsers on this machine."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from meshwright.errors import PlanError
from meshwright.monitor.report import news_of, page_of
from meshwright.monitor.run_folders import LoggedRun, find_runs
from meshwright.printable import printable

_HOST = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """A server on this machine's loopback interface whose page follows the runs.

    Args:
        paths: the runs, as for ``report``; they are read again at each request.
        port: the port; 0 takes a free one.
        every: seconds between two questions of an open page.

    Raises:
        PlanError: if there is no log, or the port is taken.
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, port: int = 0, every: float = 2.0):
        self.paths, self.every = paths, every
        find_runs(paths)
        try:
            super().__init__((_HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise PlanError(
                f"--port {port} cannot be used ({error}); choose another, or leave --port out to take a free one"
            ) from None

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{_HOST}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 30.0  # seconds without a word, after which a connection is closed

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{_HOST}:{port}", f"localhost:{port}"):
            # A page of another site whose name leads to this address must not read the runs.
            self._answer(403, "text/plain", f"open {self.server.address} instead")
        elif self.path.partition("?")[0] == "/":
            self._answer_from("text/html", lambda runs: page_of(runs, live=self.server.every))
        elif self.path.partition("?")[0] == "/data.json":
            self._answer_from("application/json", lambda runs: json.dumps(news_of(runs, live=self.server.every)))
        else:
            self._answer(404, "text/plain", f"there is only {self.server.address}")

    def _answer_from(self, kind: str, content: Callable[[Sequence[LoggedRun]], str]) -> None:
        try:
            text = content(find_runs(self.server.paths))
        except PlanError as error:  # for example a log that was removed meanwhile
            self._answer(500, "text/plain", str(error))
        except Exception as error:  # a reader of the page gets a sentence, whatever the logs hold
            why = printable(f"{type(error).__name__}: {error}"[:300])
            self._answer(500, "text/plain", f"the logs of these runs cannot be shown: {why}")
        else:
            self._answer(200, kind, text)

    def _answer(self, status: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        with contextlib.suppress(ConnectionError):  # the reader has closed the page meanwhile
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for a request."""
