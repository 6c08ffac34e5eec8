"""The socket that the server listens on."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass

from lean_engine.errors import ConfigError
from lean_engine.server.config import ServerConfig

BACKLOG = 2048
EVERYWHERE = ("0.0.0.0", "::", "")


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the address cannot be had; the message names it.
    """
    try:
        return bind_unix(config.uds) if config.uds is not None else bind_tcp(config.host, config.port)
    except OSError as error:
        where = f"uds {config.uds}" if config.uds is not None else f"host {config.host!r} and port {config.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from None


def bind_tcp(host: str, port: int) -> socket.socket:
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def bind_unix(path: str) -> socket.socket:
    """A socket file in place of one that nobody listens on any more."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if is_stale(path):
            os.unlink(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


@dataclass(frozen=True, slots=True)
class SocketFile:
    """The file of a Unix socket, to be removed by whoever bound it and by nobody else."""

    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, path: str) -> SocketFile:
        found = os.stat(path)
        return cls(path, found.st_dev, found.st_ino)

    def remove(self) -> None:
        """Remove it while the socket is open, which keeps its inode from being used again; not if another is there."""
        with suppress(OSError):
            found = os.stat(self.path)
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                os.unlink(self.path)


def is_stale(path: str) -> bool:
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return True
    return False


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """How a client on this machine reaches it."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    if host in EVERYWHERE:
        host = "127.0.0.1" if listener.family == socket.AF_INET else "::1"
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{config.root_path}"
