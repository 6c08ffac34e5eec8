"""Every error that a user can cause, by kind.

Each message is one line that names the thing, the value found and what would be right. The command line prints it
without a traceback; the server turns RequestError into an OpenAI error body.
"""


class LeanEngineError(Exception):
    """Base class; catching it catches everything the engine raises on purpose."""


class ConfigError(LeanEngineError):
    """A configuration (engine option, config.json, GGUF metadata) cannot be honoured."""


class CheckpointError(LeanEngineError):
    """Model files are missing, damaged, or contradict the configuration."""


class RequestError(LeanEngineError):
    """One request is wrong; the engine and every other request go on.

    Attributes:
        status: the HTTP status the server answers with.
        param: the name of the offending field, None where no single field is at fault.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class OutOfMemory(LeanEngineError):  # noqa: N818 - the word users search for
    """Weights, workspace or KV blocks do not fit; the message holds the byte counts."""


class LaunchError(LeanEngineError):
    """A kernel was given arguments that its declared signature forbids. A bug, never a user's fault."""


class VerifyError(LeanEngineError):
    """A compiler pass produced an ill-formed program. A bug; the message names the numbered rule."""
