"""One suite for every device: `device_options` are the engine options that choose one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lean_engine import LLM
from lean_engine.checkpoint import DEFAULT_MODEL
from lean_engine.checkpoint.demo_model import demo_model_path
from lean_engine.engine.cpu_device import compiled_kernels
from lean_engine.errors import CheckpointError, ConfigError

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
LoadLLM = Callable[..., LLM]


DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu", "cpu_kernels": "compiled", "threads": 2},
    "cpu-numpy": {"device": "cpu", "cpu_kernels": "numpy", "threads": 2},
}


@pytest.fixture(params=DEVICES)
def device_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "cpu":
        try:
            compiled_kernels(progress=False)
        except ConfigError as error:
            pytest.skip(str(error))
    return DEVICES[request.param]


@pytest.fixture
def load_llm(device_options: dict[str, Any]) -> Iterator[LoadLLM]:
    """Make LLMs that are closed when the test ends; a bare name is a directory of tests/data/tiny."""
    made: list[LLM] = []

    def load(model: str | Path = "llama-gqa-tied", **options: Any) -> LLM:
        path = TINY / model if isinstance(model, str) else model
        made.append(LLM(path, **{**device_options, **options}))
        return made[-1]

    yield load
    for llm in made:
        llm.close()


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The demo model's name, once its file is there; skipped where it cannot be had."""
    try:
        demo_model_path(progress=False)
    except CheckpointError as error:
        pytest.skip(f"the demo model is not available: {error}")
    return DEFAULT_MODEL
