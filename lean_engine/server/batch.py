"""Requests of a file in OpenAI's batch format, answered in this process by the server's own handlers.

A line is {"custom_id", "method", "url", "body"}; what comes of it is one line {"id", "custom_id", "response", "error"},
whatever it holds: a line that is no request has an error that names its number, a request that is refused has both the
response that the server would send and an error. Nothing that is wrong with a line touches another one.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request

from lean_engine.engine.core import Engine
from lean_engine.engine.messages import Report
from lean_engine.errors import RequestError
from lean_engine.llm import LLM
from lean_engine.server.bodies import decode
from lean_engine.server.chat import create_chat_completion
from lean_engine.server.completions import create_completion
from lean_engine.server.config import ServerConfig
from lean_engine.server.engine_client import EngineClient
from lean_engine.server.errors import error_body
from lean_engine.server.metrics import Metrics
from lean_engine.server.model import LoadedModel
from lean_engine.server.service import Service

log = logging.getLogger("lean_engine")

HANDLERS = {"/v1/chat/completions": create_chat_completion, "/v1/completions": create_completion}
MAX_OPEN = 4096  # requests in the engine at once: more could not run sooner, and each takes memory
STOP_SECONDS = 10.0  # for the engine's last step
NO_LIMIT = 2**62  # bytes of a body

# -- a line in


class BatchLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BodyHead(msgspec.Struct):
    """What of a body is looked at before a handler reads it."""

    stream: Any = None


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One line of the input: a request, or what is wrong with it."""

    number: int  # of the line, from 1
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    error: RequestError | None = None


def read_items(data: bytes) -> list[BatchItem]:
    """The lines of a batch file; empty ones are passed over."""
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    first_of: dict[str, int] = {}
    items = [read_item(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    return [without_twin(item, first_of) for item in items]


def read_item(number: int, text: bytes) -> BatchItem:
    try:
        line = decode(text, BatchLine)
        check_line(line)
    except RequestError as error:
        told = RequestError(str(error).replace("the body", "the line", 1), param=error.param)
        return BatchItem(number, custom_id_of(text), error=told)
    return BatchItem(number, line.custom_id, line.url, bytes(line.body))


def check_line(line: BatchLine) -> None:
    if not line.custom_id:
        raise RequestError("custom_id is empty", param="custom_id")
    if line.method != "POST":
        raise RequestError(f"method is {line.method!r}, must be 'POST'", param="method")
    if line.url not in HANDLERS:
        raise RequestError(f"url is {line.url!r}, must be one of: {', '.join(HANDLERS)}", param="url")
    with suppress(msgspec.MsgspecError):  # a body that is no object is refused by its handler
        if msgspec.json.decode(line.body, type=BodyHead).stream:
            raise RequestError("body.stream is true; a batch has no streams", param="body.stream")


def custom_id_of(text: bytes) -> str | None:
    """The custom_id of a line with whatever else is wrong."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = msgspec.json.decode(text)
        if isinstance(found, dict) and isinstance(found.get("custom_id"), str):
            custom_id: str = found["custom_id"]
            return custom_id
    return None


def without_twin(item: BatchItem, first_of: dict[str, int]) -> BatchItem:
    """The item, or an error where an earlier line has its custom_id. first_of: custom_id → line; grows."""
    if item.custom_id is None or item.error is not None:
        return item
    first = first_of.setdefault(item.custom_id, item.number)
    if first == item.number:
        return item
    message = f"custom_id {item.custom_id!r} stands in line {first} already"
    return BatchItem(item.number, item.custom_id, error=RequestError(message, param="custom_id"))


# -- a line out


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw  # what the server would send


class BatchError(msgspec.Struct):
    code: str
    message: str
    param: str | None
    line: int


class BatchOutput(msgspec.Struct):
    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None


def failed(item: BatchItem, code: str, error: RequestError, response: BatchResponse | None = None) -> BatchOutput:
    told = BatchError(code, f"line {item.number}: {error}", error.param, item.number)
    return BatchOutput(new_id(), item.custom_id, response, told)


def interrupted(item: BatchItem) -> BatchOutput:
    return failed(item, "batch_cancelled", RequestError("interrupted before it was answered"))


def new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


# -- from one to the other


async def answer(service: Service, item: BatchItem) -> BatchOutput:
    """What comes of an item; only cancellation is raised."""
    if item.error is not None:
        return failed(item, "invalid_line", item.error)
    request_id = uuid.uuid4().hex
    try:
        response = await HANDLERS[item.url](service, request_of(item, request_id))
        made = BatchResponse(response.status_code, request_id, msgspec.Raw(bytes(response.body)))
        return BatchOutput(new_id(), item.custom_id, made, None)
    except RequestError as error:
        return refused(item, error, request_id)
    except Exception as error:  # one request must not end the others
        log.exception("line %d failed", item.number)
        internal = RequestError(f"an internal error: {type(error).__name__}: {error}", status=500)
        return refused(item, internal, request_id)


def refused(item: BatchItem, error: RequestError, request_id: str) -> BatchOutput:
    body = msgspec.Raw(error_body(str(error), error.status, error.param))
    code = "server_error" if error.status >= 500 else "invalid_request"
    return failed(item, code, error, BatchResponse(error.status, request_id, body))


def request_of(item: BatchItem, request_id: str) -> Request:
    """The item as a handler takes it, from a client that waits for ever."""
    messages = [{"type": "http.request", "body": item.body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        return await asyncio.get_running_loop().create_future()  # it never hangs up

    scope = {"type": "http", "method": "POST", "path": item.url, "headers": [], "lean_engine.request_id": request_id}
    return Request(scope, receive)


@dataclass(slots=True)
class BatchRun:
    """How a run went.

    Attributes:
        num_failed: outputs that have an error.
        num_tokens: generated.
        was_interrupted: by Ctrl-C; what was not answered then is among the failed.
        is_loaded: False where it was interrupted before, and there are no outputs.
        has_ended: whether the engine's thread has; one that loads or hangs keeps the process alive.
    """

    num_failed: int = 0
    num_tokens: int = 0
    was_interrupted: bool = False
    is_loaded: bool = False
    has_ended: bool = True


async def run_batch(
    load: Callable[[], LLM],
    config: ServerConfig,
    items: Sequence[BatchItem],
    emit: Callable[[int, BatchOutput], None],
) -> BatchRun:
    """Answer all items together.

    Args:
        load: makes the LLM; called in the engine's thread.
        emit: given each item's index and output, in the order in which they come.

    Raises:
        LeanEngineError: the model cannot be loaded.
    """
    run = BatchRun()
    service = Service(config, Metrics())
    started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    llms: list[LLM] = []

    def load_engine() -> Engine:
        llms.append(load())
        service.model = LoadedModel(llms[0], config)
        return llms[0].engine

    def watch(report: Report) -> None:
        run.num_tokens += report.trace.num_output_tokens

    def fail(error: BaseException) -> None:  # what is open is told by the client
        log.critical("the engine has failed", exc_info=error if run.is_loaded else None)
        if not started.done():
            started.set_exception(error)

    service.client = EngineClient(
        load_engine, max_queued=None, watch=watch, on_ready=lambda: started.set_result(None), on_failure=fail
    )
    service.client.start()
    try:
        await answer_all(service, started, items, emit, run)
    finally:
        run.has_ended = service.client.stop(STOP_SECONDS if run.is_loaded else 0.0)
        service.close()
        if run.has_ended and llms:
            llms[0].close()
    return run


async def answer_all(
    service: Service,
    started: asyncio.Future[None],
    items: Sequence[BatchItem],
    emit: Callable[[int, BatchOutput], None],
    run: BatchRun,
) -> None:
    """Wait for the engine, then for every output; Ctrl-C ends either, a second one the process."""
    room = asyncio.Semaphore(MAX_OPEN)
    waits: list[asyncio.Future[Any]] = [started]
    loop = asyncio.get_running_loop()

    def put(index: int, output: BatchOutput) -> None:
        run.num_failed += output.error is not None
        emit(index, output)

    async def one(index: int) -> None:
        async with room:
            output = await answer(service, items[index])
        put(index, output)

    def interrupt() -> None:
        run.was_interrupted = True
        loop.remove_signal_handler(signal.SIGINT)
        for wait in waits:
            wait.cancel()

    with suppress(NotImplementedError, RuntimeError, ValueError):  # no signals here: another thread, another system
        loop.add_signal_handler(signal.SIGINT, interrupt)
    await asyncio.wait(waits)
    if started.cancelled():
        return
    started.result()
    run.is_loaded = True
    tasks = [loop.create_task(one(index)) for index in range(len(items))]
    waits += tasks
    await asyncio.wait(tasks)
    for index, task in enumerate(tasks):
        if task.cancelled():
            put(index, interrupted(items[index]))
        else:
            task.result()
