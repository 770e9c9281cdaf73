"""Runs the server as a process: its socket, its signals, and its shutdown."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Generator
from types import FrameType

import attrs
import uvicorn
from uvicorn.config import LOG_LEVELS

from ....core.errors import InputError
from .connection import BoundedHttpProtocol
from .server import OpenAIServer

# How long readers may take, after the engine has ended, to read the rest of their answers.
READERS_GRACE_S = 5.0
BACKLOG = 2048
TICK_S = 0.05


@attrs.frozen(kw_only=True)
class ProcessSettings:
    """How the process listens and ends."""

    drain_timeout_s: float  # how long requests may continue after the first signal; then they are aborted
    stall_timeout_s: float  # how long a connection may stall (`BoundedHttpProtocol`)
    log_level: str = "info"  # uvicorn's log level
    access_log: bool = True  # whether each request is logged

    def __attrs_post_init__(self) -> None:
        if not self.drain_timeout_s >= 0:
            raise InputError(f"drain_timeout_s is {self.drain_timeout_s}; it must be 0 (abort at once) or more")
        if self.log_level not in LOG_LEVELS:
            raise InputError(f"log_level {self.log_level!r} is unknown; it is one of {', '.join(LOG_LEVELS)}")
        if not self.stall_timeout_s > 0:
            raise InputError(f"stall_timeout_s is {self.stall_timeout_s}; it must be above 0")


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind a socket, so that an unavailable port is known before a model is loaded; port 0 takes a free one.

    Raises:
        InputError: no such host, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from None
    return bound


class ServingProcess(uvicorn.Server):
    """Serves until a signal arrives or the engine fails, and leaves nothing running.

    The first SIGINT or SIGTERM drains: no new request is taken, open ones may finish within `drain_timeout_s`, and the
    rest are aborted with an error for their clients. A second signal aborts at once.

    Attributes:
        engine: the engine; it is shut down when `serve` returns.
    """

    def __init__(
        self, server: OpenAIServer, settings: ProcessSettings, on_started: Callable[[], None] = lambda: None
    ) -> None:
        """Prepare the process. `serve` listens, and calls `on_started` once clients can connect."""
        super().__init__(
            uvicorn.Config(
                server.gate,
                http=BoundedHttpProtocol.with_stall_timeout(settings.stall_timeout_s),
                ws="none",
                lifespan="off",
                log_level=settings.log_level,
                access_log=settings.access_log,
                server_header=False,
                backlog=BACKLOG,
            )
        )
        self.engine = server.engine
        self._openai_server = server
        self._on_started = on_started
        self._drain_timeout_s = settings.drain_timeout_s
        self._aborts = False

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Let signals end the server, without raising them again afterwards: its caller still has to clean up."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals go to the main thread; a caller in another thread ends the server by `should_exit`
            return
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain; at the second signal abort."""
        self._aborts = self.should_exit
        self.should_exit = True
        self._openai_server.gate.is_draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await super().startup(sockets)
        self._on_started()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: end if the engine has failed."""
        if self.engine.failure is not None:
            self._openai_server.gate.is_draining = True
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listeners, end the engine, and send the rest of every answer."""
        self._openai_server.gate.is_draining = True
        ending = asyncio.create_task(self._end_engine())
        await super().shutdown(sockets)  # waits until no connection is left
        await ending
        self._openai_server.close()

    async def _end_engine(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._drain_timeout_s
        while self.engine.stats.num_unended and loop.time() < deadline_s and not self._aborts:
            await asyncio.sleep(TICK_S)
        await asyncio.to_thread(self.engine.shutdown, drain=False)  # waits for the step in flight
        deadline_s = loop.time() + READERS_GRACE_S
        while self.server_state.connections and loop.time() < deadline_s:
            await asyncio.sleep(TICK_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
