"""A group of commands whose modules are imported when they are named."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import ClassVar

import click


class LazyGroup(click.Group):
    """Finds its commands, each called `command`, in `modules`."""

    modules: ClassVar[Mapping[str, str]]  # name → the module that holds it
    noun: ClassVar[str] = "command"  # what one of them is called in errors

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in self.modules:
            raise click.UsageError(f"unknown {self.noun} {cmd_name!r}; there are: {', '.join(self.modules)}", ctx)
        found = import_module(self.modules[cmd_name]).command
        assert isinstance(found, click.Command)
        return found
