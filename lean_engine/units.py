"""Numbers as people write them: "4GiB", "512 MiB", "1.5GB", 1073741824 bytes; "1 token", "2,048 tokens"."""

from __future__ import annotations

import re

from lean_engine.errors import ConfigError

_BYTES = {"": 1, "B": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _BYTES |= {f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
    _BYTES |= {
        _letter.upper(): 1024**_power,
        _letter: 1000**_power,
    }  # a lone letter reads as in vLLM: 1K = 1024, 1k = 1000

_NUMBER_AND_UNIT = re.compile(r"(\d+)(\.\d+)?\s*([a-zA-Z]*)", re.ASCII)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def parse_bytes(text: str | int) -> int:
    """Read a number of bytes: an int >= 0, or a number with a unit (KiB..TiB and K..T binary, KB..TB and k..t decimal).

    Raises:
        ConfigError: neither; the message quotes the text.
    """
    match = _NUMBER_AND_UNIT.fullmatch(str(text).strip())
    if match is not None:
        whole, fraction, unit = match.groups()
        size = _BYTES.get(unit if len(unit) == 1 else unit.lower())
        if size is not None:
            return int(whole) * size + (int(float(fraction) * size) if fraction else 0)
    raise ConfigError(f"{text!r} is not a number of bytes; write for example 4GiB, 512MiB or 1073741824")


def format_bytes(num_bytes: int) -> str:
    """In the largest binary unit that leaves at least 1, with two decimals: "1.50 GiB"; below 1 KiB: "512 B"."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1023.995:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} TiB"
