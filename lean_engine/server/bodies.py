"""Reads request bodies: bytes within a limit and a time, then a struct of `protocol`.

Whatever is wrong is a RequestError whose param is the path of the field. A key that an object has twice is wrong too:
the decoder would take its last value, another reader its first.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from lean_engine.errors import RequestError
from lean_engine.server.errors import ClientGone
from lean_engine.server.protocol import UNSUPPORTED

S = TypeVar("S", bound=msgspec.Struct)
MAX_SEARCHED_BYTES = 2**20  # of bodies in which the field at fault is looked for: 0.2 s of a worker thread at the worst

_PATH = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*?)`")
_MISSING = re.compile(r"^Object missing required field `(.*?)`")


async def read_body(request: Request, max_bytes: int, timeout: float) -> bytes:
    """The whole body.

    Raises:
        RequestError: 413 for one that is too large, 408 for one that does not come in time.
        ClientGone: the connection was closed before its end.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large(max_bytes)
    chunks, size = [], 0
    try:
        async with asyncio.timeout(timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise too_large(max_bytes)
                chunks.append(chunk)
    except TimeoutError:
        raise RequestError(f"the body did not come within {timeout:g} s", status=408) from None
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(chunks)


def too_large(max_bytes: int) -> RequestError:
    return RequestError(f"the body is larger than {max_bytes} bytes (--max-body-bytes)", status=413)


def decode(body: bytes, kind: type[S]) -> S:
    """The body as a struct; fields that are not known but null are passed over."""
    try:
        found = checked(body, kind)
        refuse_repeated(body)
        return found
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed(body, str(error)) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def checked(body: bytes, kind: type[S]) -> S:
    """As `decode`, where the body is JSON and not nested too deeply."""
    try:
        return decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN.match(str(error))
        if unknown is not None and " - at " not in str(error) and (rest := without_nulls(body, kind)) is not None:
            return checked(rest, kind)
        raise refusal(str(error)) from None


@cache
def decoder(kind: type[S]) -> msgspec.json.Decoder[S]:
    return msgspec.json.Decoder(kind)


def without_nulls(body: bytes, kind: type[msgspec.Struct]) -> bytes | None:
    """The body less the top-level fields that `kind` lacks and whose value is null; None if there are none."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    known = set(kind.__struct_fields__)
    kept = {name: value for name, value in fields.items() if name in known or bytes(value) != b"null"}
    return msgspec.json.encode(kept) if len(kept) < len(fields) else None


class Repeated:
    """Stands for an object that has a key twice."""

    def __init__(self, key: str) -> None:
        self.key = key


def refuse_repeated(body: bytes) -> None:
    """RequestError where an object of a body, which is JSON, has a key twice; a very large body is not searched."""
    if len(body) > MAX_SEARCHED_BYTES:
        return
    is_repeated = False

    def fields_of(pairs: list[tuple[str, Any]]) -> Any:
        nonlocal is_repeated
        fields = dict(pairs)
        if len(fields) == len(pairs):
            return fields
        is_repeated = True
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        return Repeated(key)

    value = json.loads(body, object_pairs_hook=fields_of, parse_int=str, parse_float=str)  # any number passes
    if is_repeated and (found := find_impossible(value, "")) is not None:
        where, what = found
        raise RequestError(f"{where} {what}", param=where)


def refusal(message: str) -> RequestError:
    """A body that is JSON and not what it should be. message: msgspec's."""
    path = _PATH.search(message)
    where = path[1].partition("[...]")[0] if path is not None else ""  # the name of a key is not told
    said = _PATH.sub("", message).replace("`", "")
    for pattern in (_UNKNOWN, _MISSING):
        if match := pattern.match(message):
            where = f"{where}.{match[1]}" if where else match[1]
            if pattern is _MISSING:
                return RequestError(f"{where} is missing", param=where)
            return RequestError(UNSUPPORTED.get(where, f"{where} is not a field that is known here"), param=where)
    said = said[:1].lower() + said[1:]
    return RequestError(f"{where}: {said}" if where else f"the body: {said}", param=where or None)


def malformed(body: bytes, message: str) -> RequestError:
    """A body that is no JSON; where only a value is at fault, it is named."""
    if len(body) <= MAX_SEARCHED_BYTES:
        try:
            found = find_impossible(json.loads(body.decode("utf-8", errors="surrogateescape")), "")
        except (ValueError, RecursionError):
            found = None
        if found is not None:
            where, what = found
            return RequestError(f"{where or 'the body'}: {what}", param=where or None)
    reason = message.removeprefix("JSON is malformed: ")
    return RequestError(f"the body is not JSON: {reason[:1].lower()}{reason[1:]}")


def find_impossible(value: Any, path: str) -> tuple[str, str] | None:
    """The path of the first value that Python's lenient parser took and that is refused, and what it is."""
    if isinstance(value, Repeated):
        return f"{path}.{value.key}" if path else value.key, "is given twice; should be given once"
    if isinstance(value, float) and not math.isfinite(value):
        return path, f"{value!r} is not a number that JSON knows"
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        return path, "holds what is not valid Unicode (half a surrogate pair, or bytes that are not UTF-8)"
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
        bad_key = next((key for key in value if find_impossible(key, "")), None)
        if bad_key is not None:
            return path, "a name of a field holds what is not valid Unicode"
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return None
    return next((found for where, item in items if (found := find_impossible(item, where))), None)
