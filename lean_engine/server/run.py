"""The server's life: listen, load, serve, drain, end.

The socket is bound before the model is loaded, so a port that is taken is found out at once, and /health says 503 while
the model loads. SIGTERM or Ctrl-C drains: open answers have --shutdown-timeout to finish, then they end with
finish_reason "abort". Until they have, the server goes on to listen: /health and new requests get a 503 that closes
their connection, so that a load balancer sends them elsewhere. A second Ctrl-C ends the process at once. When the
engine fails, open requests get an error, /health says 503 for a moment, and the exit code is 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from uvicorn.config import Config
from uvicorn.server import Server

from lean_engine.engine.core import Engine
from lean_engine.engine.messages import Report
from lean_engine.errors import LeanEngineError
from lean_engine.llm import LLM
from lean_engine.server.app import make_app
from lean_engine.server.config import ServerConfig
from lean_engine.server.connection import protocol_class
from lean_engine.server.engine_client import DRAINING, LOADING, READY, EngineClient
from lean_engine.server.listener import SocketFile, bind, url_of
from lean_engine.server.metrics import Metrics
from lean_engine.server.model import LoadedModel
from lean_engine.server.service import Service
from lean_engine.server.statistics import log_statistics
from lean_engine.units import plural

log = logging.getLogger("lean_engine")

INTERRUPTED = 130  # exit code after Ctrl-C
FAILURE_SECONDS = 1.0  # that /health has to show a failure
DRAIN_TICK_SECONDS = 0.05  # between looks at what is open
FLUSH_SECONDS = 5.0  # for connections to end once their answers have
STOP_SECONDS = 10.0  # for the engine's last step


class HttpServer:
    """One server for one model.

    Args:
        load: makes the LLM; called in the engine's thread.
        on_ready: told the URL, on the event loop, once requests are served.

    Attributes:
        url: where it listens.
        is_ready: set once requests are served, or never will be.
        failure: what ended the engine, None where nothing did.
        has_ended: after `serve`, whether the engine's thread has ended; it has not where it loads or hangs.
    """

    def __init__(
        self, load: Callable[[], LLM], config: ServerConfig, on_ready: Callable[[str], None] | None = None
    ) -> None:
        self.config = config
        self.service = Service(config, Metrics())
        self.is_ready = threading.Event()
        self.failure: BaseException | None = None
        self.has_ended = True
        self._load = load
        self._on_ready = on_ready
        self._llm: LLM | None = None
        config.check_tls_files()
        self._socket = bind(config)
        self.url = url_of(config, self._socket)
        self._file = None if config.uds is None else SocketFile.of(config.uds)
        self._uvicorn = _Uvicorn(self._uvicorn_config(), self._begin_drain, self._remove_file)
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _uvicorn_config(self) -> Config:
        config = self.config
        return Config(
            make_app(self.service),
            loop="asyncio",
            http=protocol_class(config.client_timeout, config.max_header_bytes),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            root_path=config.root_path,
            timeout_keep_alive=max(1, int(config.client_timeout)),
            timeout_graceful_shutdown=int(FLUSH_SECONDS) + 1,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            ssl_ca_certs=config.ssl_ca_certs,
            ssl_cert_reqs=config.ssl_cert_reqs,
        )

    # -- from outside

    @property
    def num_connections(self) -> int:
        """How many are open."""
        return len(self._uvicorn.server_state.connections)

    def num_tasks(self) -> int:
        """Unfinished tasks of the event loop; for checks, from another thread."""
        return 0 if self._loop is None else len(asyncio.all_tasks(self._loop))

    def serve(self) -> int:
        """Serve until a signal, `request_exit` or a failure; return the exit code.

        Raises:
            LeanEngineError: the model cannot be loaded.
        """
        try:
            asyncio.run(self._serve())
        finally:
            self.is_ready.set()
            self._remove_file()
            self._socket.close()
        if isinstance(self.failure, LeanEngineError) and self._llm is None:
            raise self.failure
        if self.failure is not None:
            return 1
        return INTERRUPTED if self._uvicorn.was_interrupted else 0

    def request_exit(self) -> None:
        """Begin to drain, from any thread."""
        if self._loop is None:
            self._uvicorn.leave()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended already
                self._loop.call_soon_threadsafe(self._begin_drain)

    # -- inside

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        service = self.service
        service.client = EngineClient(
            self._load_engine,
            max_queued=self.config.max_queued_requests,
            watch=self._watch,
            on_ready=self._become_ready,
            on_failure=self._fail,
        )
        service.client.start()
        statistics = None if self.config.disable_log_stats else asyncio.create_task(log_statistics(service))
        try:
            await self._uvicorn.serve(sockets=[self._socket])
        finally:
            if statistics is not None:
                statistics.cancel()
            self._end()

    def _end(self) -> None:
        is_loading = self.service.client.state == LOADING
        self.has_ended = self.service.client.stop(0.0 if is_loading else STOP_SECONDS)
        self.service.close()
        if self.has_ended and self._llm is not None:
            self._llm.close()

    def _load_engine(self) -> Engine:
        llm = self._load()
        service = self.service
        model = LoadedModel(llm, self.config)
        pool = llm.engine.scheduler.pool
        options = ("enable_prefix_caching", "prefix_caching_hash_algo", "kv_cache_memory_bytes")
        cache = {name: getattr(llm.config, name) for name in options}
        cache |= {"block_size": llm.config.block_size, "num_gpu_blocks": pool.num_usable}
        service.metrics.open(model.names[0], model.max_model_len, cache, pool)
        llm.engine.grammars.guard()
        service.model, service.loaded_time, self._llm = model, int(time.time()), llm
        return llm.engine

    def _watch(self, report: Report) -> None:
        self.service.metrics.take(report)

    def _become_ready(self) -> None:
        self.is_ready.set()
        if self._on_ready is not None:
            self._on_ready(self.url)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        if not (self._llm is None and isinstance(error, LeanEngineError)):  # that one is raised by `serve`
            log.critical("the engine has failed", exc_info=error)
        delay = 0.0 if self._llm is None else FAILURE_SECONDS
        asyncio.get_running_loop().call_later(delay, self._uvicorn.leave)

    def _remove_file(self) -> None:
        if self._file is not None:
            self._file.remove()

    def _begin_drain(self) -> None:
        """On the event loop, once the server is to end."""
        client = self.service.client
        if client.state == READY:
            client.state = DRAINING
            self._drain = asyncio.create_task(self._end_answers())
        elif client.state != DRAINING:
            self._uvicorn.leave()

    async def _end_answers(self) -> None:
        """Wait for what is open, for a limited time, before the listening socket is closed."""
        client, timeout = self.service.client, self.config.shutdown_timeout
        deadline = time.monotonic() + timeout
        if client.num_open:
            log.info("ending %s, for at most %g s", plural(client.num_open, "answer"), timeout)
        while client.num_open and client.state == DRAINING and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_TICK_SECONDS)
        if client.state == DRAINING:
            client.abort_all()
        self._uvicorn.leave()


class _Uvicorn(Server):
    """uvicorn, with its own idea of signals: SIGTERM and Ctrl-C drain, a second Ctrl-C ends the process."""

    def __init__(self, config: Config, on_exit: Callable[[], None], on_abandon: Callable[[], None]) -> None:
        super().__init__(config)
        self.was_interrupted = False
        self._is_ending = False
        self._on_exit = on_exit
        self._on_abandon = on_abandon

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def note(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT and self._is_ending:
                self._on_abandon()
                os._exit(INTERRUPTED)
            self.was_interrupted = number == signal.SIGINT
            self._is_ending = True
            loop.call_soon_threadsafe(self._on_exit)

        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def leave(self) -> None:
        self.should_exit = True


def raise_file_limit() -> None:
    """Let the process hold as many connections as the system allows it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
