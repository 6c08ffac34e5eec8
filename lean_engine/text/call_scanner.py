"""Reads one tool call, `{"name": …, "arguments": {…}}`, character by character, while a model writes it.

The arguments come out as the text that the model writes, before the object is complete. Only as much of JSON is checked
as is needed to find the parts; whoever can wait for the end checks the arguments as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from enum import Enum, auto

BLANKS = " \t\r\n"
ARGUMENTS = ("arguments", "parameters")
KNOWN_KEYS = ("name", *ARGUMENTS, "type", "id")


class Status(Enum):
    OPEN = auto()  # what was read can still become a call
    COMPLETE = auto()  # the last character closed it
    BROKEN = auto()  # the last character showed that it is none


class CallScanner:
    """One call. `feed` characters while `status` is OPEN.

    Args:
        names: of the tools; a call of any other is none. None = any name will do.

    Attributes:
        status: see Status.
        name: of the tool, None until it is known.
        is_begun: the name is known, and that there are arguments: the call can be shown to the user.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.status = Status.OPEN
        self.name: str | None = None
        self.is_begun = False
        self._names = names
        self._expect: Callable[[str], None] = self._brace  # takes the next character
        self._key = ""
        self._value: list[str] = []  # of the key being read
        self._depth = 0  # of objects and arrays inside the value
        self._is_string = False  # inside a string of the value ...
        self._is_escaped = False  # ... and behind its backslash
        self._has_arguments = False
        self._arguments: list[str] = []  # since the last take_arguments

    def feed(self, char: str) -> None:
        """Read the next character."""
        self._expect(char)
        self.is_begun = self.name is not None and self._has_arguments

    def take_arguments(self) -> str:
        """The JSON text of the arguments since the last call of this."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    # -- the object itself

    def _brace(self, char: str) -> None:
        if char == "{":
            self._expect = self._first_key
        elif char not in BLANKS:
            self.status = Status.BROKEN

    def _first_key(self, char: str) -> None:
        if char == "}":
            self._close()
        else:
            self._next_key(char)

    def _next_key(self, char: str) -> None:
        if char == '"':
            self._value = [char]
            self._expect = self._in_key
        elif char not in BLANKS:
            self.status = Status.BROKEN

    def _in_key(self, char: str) -> None:
        self._value.append(char)
        if char == '"':  # no key that is known holds an escape
            self._key = "".join(self._value)[1:-1]
            self._expect = self._colon
            if self._key not in KNOWN_KEYS and not self.is_begun:
                self.status = Status.BROKEN

    def _colon(self, char: str) -> None:
        if char == ":":
            self._expect = self._before_value
        elif char not in BLANKS:
            self.status = Status.BROKEN

    def _comma(self, char: str) -> None:
        if char == ",":
            self._expect = self._next_key
        elif char == "}":
            self._close()
        elif char not in BLANKS:
            self.status = Status.BROKEN

    def _close(self) -> None:
        if self.name is None:
            self.status = Status.BROKEN
            return
        self.status = Status.COMPLETE
        if not self._has_arguments:
            self._set_arguments("{}")

    # -- a value

    def _before_value(self, char: str) -> None:
        if char in BLANKS:
            return
        self._value, self._depth, self._is_string = [], 0, False
        self._expect = self._in_value
        if char == "{" and self._key in ARGUMENTS:
            if self._has_arguments:
                self.status = Status.BROKEN
                return
            self._has_arguments = True
            self._expect = self._in_arguments
        self._expect(char)

    def _in_value(self, char: str) -> None:
        if not self._is_string and self._depth == 0 and char in ",}]" + BLANKS:  # the end of a number or a word
            self._take_value()
            if self.status is Status.OPEN:
                self._comma(char)
            return
        self._value.append(char)
        if self._is_last(char):
            self._take_value()

    def _in_arguments(self, char: str) -> None:
        # A line break inside a string is no JSON, but what models write.
        self._arguments.append(json.dumps(char)[1:-1] if self._is_string and char < " " else char)
        if self._is_last(char):
            self._expect = self._comma

    def _is_last(self, char: str) -> bool:
        """Whether this character ends a value that is a string, an object or an array."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_string:
            self._is_escaped = char == "\\"
            self._is_string = char != '"'
            return not self._is_string and self._depth == 0
        elif char == '"':
            self._is_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def _take_value(self) -> None:
        """Use the value of the key; anything but the name and the arguments is passed over."""
        self._expect = self._comma
        text = "".join(self._value)
        try:
            value = json.loads(text)
        except ValueError:
            self.status = Status.BROKEN
            return
        if self._key == "name":
            self._set_name(value)
        elif self._key in ARGUMENTS:
            self._set_arguments("{}" if value is None else value)

    def _set_name(self, value: object) -> None:
        is_new = isinstance(value, str) and value and self.name is None
        if not is_new or (self._names is not None and value not in self._names):
            self.status = Status.BROKEN
        else:
            self.name = str(value)

    def _set_arguments(self, value: object) -> None:
        """Arguments that are not written as an object: as its JSON text, or as nothing."""
        if self._has_arguments or not is_object_text(value):
            self.status = Status.BROKEN
            return
        self._has_arguments = True
        self._arguments.append(str(value))


def is_object_text(value: object) -> bool:
    """Whether this is the JSON text of an object."""
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        return False
