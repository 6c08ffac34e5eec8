"""The GGUF parser against files the gguf package writes, and one clear line for every kind of damage."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf_writing import add_tensor, write_gguf

from lean_engine.checkpoint.gguf_file import _USUAL_TYPES, GgufFile
from lean_engine.errors import CheckpointError

VALUES = np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32)


def failure(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        GgufFile(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_every_value_type_is_read(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "uint8": 200,
        "int8": -3,
        "uint16": 60000,
        "int16": -300,
        "uint32": 1 << 31,
        "int32": -(1 << 30),
        "uint64": 1 << 63,
        "int64": -(1 << 62),
        "float32": 1e-05,
        "float64": math.pi,
        "bool": True,
        "string": "Ġé",
        "array": ["a", "", "日本"],
    }
    arrays = {"ints": [1, -2], "floats": [0.5, 0.25], "bools": [True, False]}

    def fill(writer: GGUFWriter) -> None:
        for kind, value in values.items():
            getattr(writer, f"add_{kind}")(f"k.{kind}", value)
        for key, array in arrays.items():
            writer.add_array(key, array)

    metadata = GgufFile(write_gguf(tmp_path / "x.gguf", fill)).metadata
    assert {kind: metadata[f"k.{kind}"] for kind in values if kind != "array"} | {
        "array": list(metadata["k.array"])
    } == values
    assert {key: metadata[key] for key in arrays} == arrays
    assert metadata["general.architecture"] == "llama"


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_tensor_is_dequantised_as_the_gguf_package_does(tmp_path: Path, kind: Type) -> None:
    file = GgufFile(write_gguf(tmp_path / "x.gguf", lambda w: add_tensor(w, "t", VALUES, kind)))
    expected = gguf.quants.dequantize(gguf.quants.quantize(VALUES, kind), kind)
    assert file.tensors["t"].shape == VALUES.shape
    assert file.tensor("t").dtype == np.float32
    assert np.array_equal(file.tensor("t"), expected)
    assert np.array_equal(file.tensor("t", index=4), expected[4])
    file.release("t")
    file.release("t", index=1)
    assert np.array_equal(file.tensor("t"), expected)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_1])
def test_tensor_comes_as_it_is_stored_too(tmp_path: Path, kind: Type) -> None:
    """Elements in their own type, or each row's blocks as bytes."""
    file = GgufFile(write_gguf(tmp_path / "x.gguf", lambda w: add_tensor(w, "t", VALUES, kind)))
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    assert file.tensors["t"].stored_type == names.get(kind.name, kind.name.lower())
    stored = file.stored_rows("t")
    assert len(stored) == len(VALUES)
    assert stored.tobytes() == gguf.quants.quantize(VALUES, kind).tobytes()
    assert np.array_equal(file.stored_rows("t", index=4), stored[4])
    if kind.name not in names:
        assert np.array_equal(gguf.quants.dequantize(stored, kind), file.tensor("t"))


def test_k_quant_is_dequantised_as_the_gguf_package_does(tmp_path: Path) -> None:
    raw = np.random.default_rng(1).integers(0, 120, (5, 144), dtype=np.uint8)  # blocks of Q4_K, 256 elements each
    path = write_gguf(tmp_path / "x.gguf", lambda w: w.add_tensor("t", raw, raw_dtype=Type.Q4_K))
    assert GgufFile(path).tensors["t"].shape == (5, 256)
    assert np.array_equal(GgufFile(path).tensor("t"), gguf.quants.dequantize(raw, Type.Q4_K))


def test_tensor_of_many_spans_keeps_its_order(tmp_path: Path) -> None:
    values = np.arange(5 * 131072 // 64 * 64 + 64, dtype=np.float32).reshape(-1, 64) % 251
    file = GgufFile(write_gguf(tmp_path / "x.gguf", lambda w: add_tensor(w, "t", values, Type.F16)))
    assert np.array_equal(file.tensor("t"), values)


def test_alignment_of_the_file_is_honoured(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_custom_alignment(256)
        add_tensor(writer, "a", VALUES[0, :3])
        add_tensor(writer, "b", VALUES)

    file = GgufFile(write_gguf(tmp_path / "x.gguf", fill))
    assert file.tensors["b"].offset % 256 == 0
    assert np.array_equal(file.tensor("b"), VALUES)
    assert np.array_equal(file.tensor("a"), VALUES[0, :3])


def test_type_without_dequantisation_is_named_with_its_tensor(tmp_path: Path) -> None:
    raw = np.zeros((1, 292), np.uint8)
    file = GgufFile(write_gguf(tmp_path / "x.gguf", lambda w: w.add_tensor("t", raw, raw_dtype=Type.Q8_K)))
    with pytest.raises(CheckpointError, match=r"tensor t has the type Q8_K, which cannot be dequantised"):
        file.tensor("t")
    with pytest.raises(CheckpointError, match="holds no tensor u"):
        file.tensor("u")


def test_truncated_data_says_both_sizes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", lambda w: add_tensor(w, "t", VALUES))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert f"is truncated: tensor t ends at byte {len(whole)}, the file has {len(whole) - 1}" in failure(path)


def test_header_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_string("s", "text")
        writer.add_array("a", ["x", "yz"])
        writer.add_array("i", [1, 2, 3])
        add_tensor(writer, "t", VALUES[0, :3])

    path = write_gguf(tmp_path / "x.gguf", fill)
    whole = path.read_bytes()
    for size in range(4, len(whole) - 32, 3):
        path.write_bytes(whole[:size])
        assert "is truncated" in failure(path)


def head(version: int = 3, num_tensors: int = 0, num_pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)


def key(value_type: int) -> bytes:
    return struct.pack("<Q1sI", 1, b"k", value_type)


def tensor_entry(dims: list[int], type_number: int) -> bytes:
    return struct.pack(f"<Q1sI{len(dims)}QIQ", 1, b"t", len(dims), *dims, type_number, 0)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"GGML" + bytes(40), "is not a GGUF file: it begins with b'GGML'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (head(version=1), "has GGUF version 1; known: 2, 3"),
        (head(version=3 << 24), "big-endian"),
        (head(num_pairs=1) + key(13) + bytes(8), "k has the unknown value type 13"),
        (head(num_pairs=1) + key(9) + struct.pack("<IQ", 13, 1) + bytes(8), "k has the unknown value type 13"),
        (head(num_pairs=1) + key(9) + struct.pack("<IQ", 9, 1) + bytes(20), "k is an array of arrays"),
        (head(num_pairs=1) + key(9) + struct.pack("<IQ", 4, 1 << 62), "is truncated"),
        (head(num_pairs=1) + key(8) + struct.pack("<Q", 2) + b"\xff\xfe", "is not UTF-8"),
        (head(num_pairs=1 << 60), "is truncated"),
        (head(num_tensors=1) + tensor_entry([32], 4) + bytes(64), "tensor t has the unknown type number 4"),
        (head(num_tensors=1) + tensor_entry([1] * 5, 0) + bytes(64), "tensor t has 5 dimensions, must be 1 to 4"),
        (head(num_tensors=1) + tensor_entry([33], 8) + bytes(64), "rows of 33 elements, Q8_0 needs a multiple of 32"),
        (head(num_tensors=1) + tensor_entry([1 << 40, 1 << 40], 0) + bytes(64), "is truncated: tensor t ends at byte"),
        (head(num_tensors=2) + tensor_entry([1], 0) * 2 + bytes(64), "lists 2 tensors but only 1 different names"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_file_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert expected in failure(path)


def test_version_2_is_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", lambda w: add_tensor(w, "t", VALUES))
    path.write_bytes(b"GGUF" + struct.pack("<I", 2) + path.read_bytes()[8:])
    assert np.array_equal(GgufFile(path).tensor("t"), VALUES)


def test_bad_alignment_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", lambda w: w.add_uint32("general.alignment", 12))
    assert "general.alignment is 12, must be a power of two" in failure(path)


def test_one_of_several_split_files_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", lambda w: w.add_uint16("split.count", 3))
    assert "is one of 3 split files" in failure(path)


def test_usual_types_are_those_of_the_gguf_package() -> None:
    for number, (name, *sizes) in _USUAL_TYPES.items():
        assert Type(number).name == name
        assert list(gguf.GGML_QUANT_SIZES[Type(number)]) == sizes
        assert name in ("F32", "F16") or hasattr(gguf.quants, name)


def test_rare_type_is_looked_up_in_the_gguf_package(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        for name, kind in (("rare", Type.IQ4_NL), ("none", Type.Q8_K)):
            blocks = np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
            writer.add_tensor(name, blocks, raw_dtype=kind)

    file = GgufFile(write_gguf(tmp_path / "x.gguf", fill))
    assert (file.tensors["rare"].type_name, file.tensors["rare"].shape) == ("IQ4_NL", (2, 32))
    file.check_loadable("rare")
    with pytest.raises(CheckpointError, match="has the type Q8_K, which cannot be dequantised"):
        file.check_loadable("none")


def test_strings_of_an_array_are_read_when_asked_for(tmp_path: Path) -> None:
    texts = ["a", "", "日本", "Ġé"]
    path = write_gguf(tmp_path / "x.gguf", lambda w: w.add_array("k", texts))
    found = GgufFile(path).metadata["k"]
    assert (len(found), list(found), found[1:3], found[2], found[-1]) == (4, texts, texts[1:3], "日本", "Ġé")
    assert "日本" in found
    with pytest.raises(IndexError):
        found[4]
    assert repr(found) == "['a', …]"
    content = path.read_bytes()
    path.write_bytes(b"")
    assert list(found) == texts
    place = content.index("日本".encode())
    path.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    damaged = GgufFile(path).metadata["k"]
    assert damaged[3] == "Ġé"
    for read in (list, lambda strings: strings[2]):
        with pytest.raises(CheckpointError, match=f"the string at byte {place} is not UTF-8"):
            read(damaged)


def test_usual_file_is_opened_without_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", lambda w: add_tensor(w, "t", VALUES, Type.Q4_1))
    code = (
        "import sys; from pathlib import Path; from lean_engine.checkpoint.gguf_file import GgufFile; "
        f"file = GgufFile(Path({str(path)!r})); file.check_loadable('t'); file.stored_rows('t'); "
        "print('gguf' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
