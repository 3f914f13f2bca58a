"""A page on this machine's own address that follows runs while they are written."""

from __future__ import annotations

import socket
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.server.server import Server

from gradlens.history.records import LeftOutWarning
from gradlens.plotting.loading import GrowingRun
from gradlens.report.page import Live, Page, page, waiting

ADDRESS = "127.0.0.1"
"""No other machine can connect to it."""


class Following:
    """Runs that are read on while they grow, and the page of what they have by now."""

    def __init__(self, paths: Mapping[str, Path], title: str, interval: float) -> None:
        self._runs = {name: GrowingRun(path) for name, path in paths.items()}
        self._title = title
        self._interval = interval
        self._next = 0.0
        self._page: Page | None = None
        self.news = ""
        """Why there is no page yet."""

    def page(self) -> Page | None:
        """The page, of what was read at most ``interval`` seconds ago; ``None`` if there is none.

        All browsers share it. Long runs take long to read: no more than half of the time.
        """
        started = time.monotonic()
        if started < self._next:
            return self._page
        try:
            with warnings.catch_warnings():
                # The page names what is left out.
                warnings.simplefilter("ignore", LeftOutWarning)
                awaited = [run.look() for run in self._runs.values()]
                self.news = next(filter(None, awaited), self.news)
                histories = {name: run.history for name, run in self._runs.items()}
                if "" in awaited and all(history.steps for history in histories.values()):
                    self._page = page(histories, self._title)
        except ValueError as error:
            self.news = str(error)
        elapsed = time.monotonic() - started
        self._next = started + elapsed + max(self._interval, elapsed)
        return self._page


def server(following: Following, port: int, interval: float) -> Server:
    """A server of the page, which is brought up to date every ``interval`` seconds.

    Its port is another one if ``port`` is taken.
    """

    def fill(document: Document) -> None:
        shown = following.page()
        if shown is None:
            waiting(document, following.news)
            return
        live = Live(shown)
        live.document(document, live=True)

        def refresh() -> None:
            latest = following.page()
            if latest is not None and latest is not live.page:
                live.update(latest)

        document.add_periodic_callback(refresh, int(1000 * interval))

    found = free_port(port)
    return Server(
        Application(FunctionHandler(fill)),
        address=ADDRESS,
        port=found,
        allow_websocket_origin=[f"{ADDRESS}:{found}", f"localhost:{found}"],
    )


def free_port(wish: int) -> int:
    """A port, or any other if it is taken."""
    for port in (wish, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ADDRESS, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"{ADDRESS} has no free port")
