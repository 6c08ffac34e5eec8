from pathlib import Path

import click
import pytest

from lean_engine import StructuredOutputsParams
from lean_engine.cli.forms import read_form


def test_no_flag_is_no_form() -> None:
    assert read_form(None, None, (), None) is None


def test_each_flag_makes_its_form(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "null"}')
    (tmp_path / "g.lark").write_text('start: "é"', encoding="utf-8")
    schema = StructuredOutputsParams(json={"type": "null"})
    assert read_form(' {"type": "null"}', None, (), None) == schema
    assert read_form(str(tmp_path / "schema.json"), None, (), None) == schema
    assert read_form(None, "a+", (), None) == StructuredOutputsParams(regex="a+")
    assert read_form(None, None, ("a", "b"), None) == StructuredOutputsParams(choice=["a", "b"])
    grammar = StructuredOutputsParams(grammar='start: "é"')
    assert read_form(None, None, (), 'start: "é"') == grammar
    assert read_form(None, None, (), str(tmp_path / "g.lark")) == grammar


def test_two_flags_or_a_missing_file_are_usage_errors() -> None:
    with pytest.raises(click.UsageError, match="--regex and --choice exclude each other"):
        read_form(None, "a", ("b",), None)
    with pytest.raises(
        click.UsageError, match=r"--json-schema 'none\.json' is neither text of that form nor a readable"
    ):
        read_form("none.json", None, (), None)
    with pytest.raises(click.UsageError, match="--grammar 'none' is neither"):
        read_form(None, None, (), "none")
