"""Service: what every handler needs, the loaded model, the engine, worker threads and the options."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lean_engine.sampling.params import SamplingParams
from lean_engine.server.bodies import decode, read_body
from lean_engine.server.config import ServerConfig
from lean_engine.server.engine_client import EngineClient
from lean_engine.server.metrics import Metrics
from lean_engine.server.model import LoadedModel
from lean_engine.server.protocol import GenerationRequest

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
SMALL_BODY_BYTES = 2**16  # decoded on the event loop: as a rule in less than a millisecond
NUM_TEXT_THREADS = 2  # templates and tokenising; more would only contend for the interpreter


class Service:
    """Everything behind the routes.

    Attributes:
        model: None until it is loaded.
        client: set when the event loop runs.
    """

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self.config = config
        self.metrics = metrics
        self.model: LoadedModel | None = None
        self.loaded_time = 0  # seconds since 1970
        self.client: EngineClient
        self._threads = ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="text")

    def open_model(self) -> LoadedModel:
        """The model; RequestError, status 503, while there is none or no new requests are taken."""
        self.client.check_open()
        assert self.model is not None
        return self.model

    async def read(self, http: Request, kind: type[S]) -> S:
        """A request's body; RequestError where it is too large, too slow or wrong."""
        body = await read_body(http, self.config.max_body_bytes, self.config.client_timeout)
        return decode(body, kind) if len(body) <= SMALL_BODY_BYTES else await self.in_thread(decode, body, kind)

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that takes long, off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))

    async def compile_grammar(self, params: SamplingParams) -> None:
        """Make the grammar of an answer's form before the engine needs it; RequestError where it cannot be honoured."""
        if params.structured_outputs is not None and self.model is not None:
            await self.in_thread(self.model.llm.engine.grammars.compile, params.structured_outputs)

    def identify(self, http: Request, prefix: str, body: GenerationRequest) -> tuple[str, float, dict[str, int]]:
        """A response's id, when its request came, and where its counts go."""
        arrival: float = http.scope.get("lean_engine.arrival", time.monotonic())
        own: str = http.scope.get("lean_engine.request_id", "")
        counts: dict[str, int] = http.scope.setdefault("lean_engine.counts", {})
        return f"{prefix}-{body.request_id or own or uuid.uuid4().hex}", arrival, counts

    def writes_token_ids(self, body: GenerationRequest) -> bool:
        """Whether log-probabilities name tokens by their ids."""
        if body.return_tokens_as_token_ids is not None:
            return body.return_tokens_as_token_ids
        return self.config.return_tokens_as_token_ids

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def json_response(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
