"""lean-engine: an LLM serving engine without PyTorch.

The public names. Each is imported when it is first used, so that `import lean_engine` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lean_engine.config import EngineConfig
    from lean_engine.engine.outputs import CompletionOutput, RequestOutput
    from lean_engine.errors import LeanEngineError
    from lean_engine.llm import LLM
    from lean_engine.sampling.params import SamplingParams
    from lean_engine.sampling.structured_outputs import StructuredOutputsParams

_HOMES = {
    "LLM": "lean_engine.llm",
    "SamplingParams": "lean_engine.sampling.params",
    "StructuredOutputsParams": "lean_engine.sampling.structured_outputs",
    "EngineConfig": "lean_engine.config",
    "RequestOutput": "lean_engine.engine.outputs",
    "CompletionOutput": "lean_engine.engine.outputs",
    "LeanEngineError": "lean_engine.errors",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "LeanEngineError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lean_engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
