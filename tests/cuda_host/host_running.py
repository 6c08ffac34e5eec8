"""Modules of this directory's .cu files, which include the engine's headers."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from cuda_host import HostKernel, HostModule

HERE = Path(__file__).resolve().parent
CUDA = HERE.parents[1] / "cuda"


def kernels_of(text: str) -> list[str]:
    """The kernels of a source; templates for bfloat16."""
    found = re.findall(r"(template <typename T>\s*)?__global__ void(?:\s*__launch_bounds__\(\d+\))?\s*(\w+)\(", text)
    return [f"{name}<bfloat16>" if template else name for template, name in found]


@cache
def module(name: str, is_checked: bool) -> HostModule:
    text = (HERE / name).read_text()
    return HostModule(CUDA / name, kernels_of(text), is_checked=is_checked, source=text)


def kernel(name: str, function: str, is_checked: bool = True) -> HostKernel:
    return module(name, is_checked).get_function(function)
