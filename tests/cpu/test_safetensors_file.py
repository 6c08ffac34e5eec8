"""The safetensors reader: values as the reference package wrote them, and one clear line for every kind of damage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lean_engine.checkpoint.safetensors_file import SafetensorsFile
from lean_engine.errors import CheckpointError


def write(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def failure(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_equal_what_the_reference_package_wrote(tmp_path: Path, dtype: str) -> None:
    numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    values = np.random.default_rng(0).standard_normal((3, 5)).astype(numpy_dtype)
    scalar, empty = np.array(2.5, numpy_dtype), np.zeros((0, 4), numpy_dtype)
    save_file({"w": values, "s": scalar, "e": empty}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.names()) == {"w", "s", "e"}
    assert file.shape("w") == (3, 5)
    assert file.dtype("w") == dtype
    assert file.tensor("w").dtype == numpy_dtype
    assert np.array_equal(file.tensor("w"), values)
    assert file.tensor("s") == scalar
    assert file.tensor("e").shape == (0, 4)


def test_tensor_is_a_read_only_view_of_the_map(tmp_path: Path) -> None:
    save_file({"w": np.ones((4, 4), np.float32)}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    first, second = file.tensor("w"), file.tensor("w")
    assert np.shares_memory(first, second)
    assert not first.flags.writeable
    del file, second
    assert first.sum() == 16  # the map outlives the object it came from


def test_tensor_the_file_does_not_align_is_an_aligned_copy(tmp_path: Path) -> None:
    header = json.dumps({"w": entry("F32", [2], 0, 8)}).encode()
    header += b" " * (-(8 + len(header)) % 4 + 1)
    file = SafetensorsFile(write(tmp_path / "x.safetensors", header, np.array([1, 2], "<f4").tobytes()))
    assert file.tensor("w").flags.aligned
    assert file.tensor("w").tolist() == [1.0, 2.0]


def test_tensor_of_another_type_is_refused_only_when_it_is_asked_for(tmp_path: Path) -> None:
    header = {"a": entry("F8_E4M3", [2], 0, 2), "b": entry("F16", [1], 2, 4)}
    file = SafetensorsFile(write(tmp_path / "x.safetensors", header, bytes(4)))
    assert file.tensor("b").tolist() == [0.0]
    with pytest.raises(CheckpointError, match=r"x\.safetensors: tensor a is stored as F8_E4M3.*F32, F16, BF16"):
        file.tensor("a")
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        file.dtype("a")


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file({"w": np.ones(1, np.float32)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"x\.safetensors: holds no tensor v"):
        SafetensorsFile(tmp_path / "x.safetensors").shape("v")


def test_truncated_file_says_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": np.ones((8, 8), np.float32)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert f"describes {len(whole)} bytes, the file has {len(whole) - 100}" in failure(path)
    path.write_bytes(whole + b"x")
    assert f"describes {len(whole)} bytes, the file has {len(whole) + 1}" in failure(path)
    path.write_bytes(whole[:20])
    assert "announces a header of" in failure(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"abc", "not a safetensors file"),
        (b"PK\x03\x04" + b"\xff" * 40, "not a safetensors file"),
        ((16).to_bytes(8, "little") + b"x" * 16, "header is not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    ],
)
def test_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert expected in failure(path)


@pytest.mark.parametrize(
    ("damaged", "expected"),
    [
        (entry("F32", [2], 0, 4), "F32 of shape [2], takes 8 bytes, its header entry gives it 4"),
        (entry("F32", [-2], 0, 8), "entry of tensor w is damaged"),
        (entry("F32", [2], 8, 0), "entry of tensor w is damaged"),
        (entry("F32", [2], -8, 0), "entry of tensor w is damaged"),
        ({"dtype": "F32", "shape": [2]}, "entry of tensor w is damaged"),
        ({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}, "entry of tensor w is damaged"),
        ("F32", "entry of tensor w is damaged"),
    ],
)
def test_damaged_header_entry_is_refused(tmp_path: Path, damaged: Any, expected: str) -> None:
    assert expected in failure(write(tmp_path / "x.safetensors", {"w": damaged}, bytes(8)))


def test_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    assert "cannot be read" in failure(tmp_path / "absent.safetensors")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_release_drops_the_resident_pages_of_a_tensor(tmp_path: Path) -> None:
    save_file({"w": np.ones(4 << 20, np.float32), "v": np.ones(7, np.float32)}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    before = resident_file_kib()
    assert file.tensor("w").sum() == 4 << 20
    touched = resident_file_kib()
    file.release("w")
    file.release("v")  # smaller than a page: nothing to do
    assert touched - before > 15_000
    assert resident_file_kib() - before < 1_000
    assert file.tensor("w")[-1] == 1.0
    assert file.tensor("v")[-1] == 1.0


def resident_file_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))
