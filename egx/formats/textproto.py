"""Protocol buffers in text form, without a schema: fields with their lines, one at a time.

After the text format's specification (protobuf.dev/reference/protobuf/textformat-spec). A file is
read line by line and one top-level field is held at a time, so that its size does not matter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from egx.errors import FormatError

# One match a token, with the space before it and, for most names, the colon after it.
_TOKEN = re.compile(
    r"""[\s\ufeff]*(?:
    (?P<key>[A-Za-z_]\w*)\s*:
    |(?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?[fF]?))(?![\w.])
    |(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<name>[-+]?[A-Za-z_][\w.]*)
    |(?P<extension>\[[\w./\s%+-]*[A-Za-z][\w./\s%+-]*\](?=\s*[:{<]))
    |(?P<mark>[][{}<>:;,])
    |(?P<rest>\#.*|$|.+)
    )""",
    re.VERBOSE,
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_PLAIN = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}
_FLOATS = {"inf": math.inf, "infinity": math.inf, "nan": math.nan}
_MOST_DEPTH = 100


class Word(str):
    """A bare word, such as true or an entry of an enumeration; not a string."""


Value: TypeAlias = "int | float | str | list[Field]"


class Field(NamedTuple):
    """`value` is a number, a str, a Word, or the fields of a message."""

    line: int
    name: str
    value: Value


_Token = tuple[int, str, str]
"""Line, kind and text; the kind of a mark is the mark itself."""


def read_fields(lines: Iterable[str], label: str) -> Iterator[Field]:
    """The top-level fields of a file called `label`.

    Raises:
        FormatError: naming the file, the line, and what was expected there.
    """
    tokens = _tokens(lines, label)
    parser = _Parser(tokens, label)
    while parser.ahead[1] != "end":
        yield from parser.field(0)


def _tokens(lines: Iterable[str], label: str) -> Iterator[_Token]:
    number = 0
    for number, line in enumerate(lines, 1):
        for match in _TOKEN.finditer(line):
            kind = match.lastgroup
            assert kind is not None
            text = match.group(kind)
            if kind == "mark":
                yield number, text, text
            elif kind != "rest":
                yield number, kind, text
            elif text and text[0] != "#":
                cut = text[0] in "\"'"
                what = "a string that does not end" if cut else repr(text.strip()[:20])
                raise FormatError(f"{label}:{number}: not text protobuf: {what}")
    while True:
        yield number, "end", "the end of the file"


class _Parser:
    """Reads fields with one token of look-ahead."""

    def __init__(self, tokens: Iterator[_Token], label: str):
        self.tokens, self.label = tokens, label
        self.ahead = next(tokens)

    def next(self) -> _Token:
        token, self.ahead = self.ahead, next(self.tokens)
        return token

    def error(self, token: _Token, expected: str) -> FormatError:
        line, kind, text = token
        found = text if kind == "end" else repr(text)
        return FormatError(f"{self.label}:{line}: expected {expected}, got {found}")

    def field(self, depth: int) -> list[Field]:
        """A field; several of one name when a list of values is given."""
        line, kind, name = token = self.next()
        if kind not in ("key", "name", "extension"):
            raise self.error(token, "the name of a field")
        colon = kind == "key"
        if not colon and self.ahead[1] == ":":
            colon = True
            self.next()
        opens = self.ahead[1]
        if not colon and opens not in ("{", "<", "["):
            raise self.error(self.ahead, f"':' or '{{' after {name!r}")
        if opens == "[":
            fields = [Field(line, name, value) for value in self.values(depth)]
        else:
            fields = [Field(line, name, self.value(depth))]
        if self.ahead[1] in (",", ";"):
            self.next()
        return fields

    def values(self, depth: int) -> list[Value]:
        self.next()
        found: list[Value] = []
        while self.ahead[1] != "]":
            found.append(self.value(depth))
            if self.ahead[1] == ",":
                self.next()
            elif self.ahead[1] != "]":
                raise self.error(self.ahead, "',' or ']'")
        self.next()
        return found

    def value(self, depth: int) -> Value:
        _, kind, text = token = self.next()
        if kind == "number":
            try:
                return _number(text)
            except ValueError:  # more digits than Python takes
                raise self.error(token, "a number") from None
        if kind in ("{", "<"):
            if depth >= _MOST_DEPTH:
                raise self.error(token, f"at most {_MOST_DEPTH} messages in each other")
            return self.message("}" if kind == "{" else ">", depth + 1)
        if kind == "string":
            joined = _unescape(text)
            while self.ahead[1] == "string":
                joined += _unescape(self.next()[2])
            return joined
        if kind == "name":
            sign, word = (-1, text[1:]) if text[0] == "-" else (1, text)
            return sign * _FLOATS[word.lower()] if word.lower() in _FLOATS else Word(text)
        raise self.error(token, "a value")

    def message(self, end: str, depth: int) -> list[Field]:
        fields: list[Field] = []
        while self.ahead[1] != end:
            if self.ahead[1] == "end":
                raise self.error(self.ahead, f"{end!r}")
            fields += self.field(depth)
        self.next()
        return fields


def _number(text: str) -> int | float:
    if text.isdigit() and (text[0] != "0" or len(text) == 1):
        return int(text)
    digits = text.lstrip("+-").lower()
    sign = -1 if text[0] == "-" else 1
    if digits.startswith("0x"):
        return sign * int(digits, 16)
    if digits.isdigit():
        octal = len(digits) > 1 and digits[0] == "0" and not set(digits) & set("89")
        return sign * int(digits, 8 if octal else 10)
    return sign * float(digits.rstrip("f"))


def _unescape(text: str) -> str:
    inner = text[1:-1]
    if "\\" not in inner:
        return inner

    def plain(match: re.Match[bytes]) -> bytes:
        octal, hexadecimal, other = match.groups()
        if octal:
            return bytes([int(octal, 8) & 255])
        if hexadecimal:
            return bytes([int(hexadecimal, 16)])
        return _PLAIN.get(other, other)

    # Through bytes: what is not ASCII may be written byte by byte.
    return _ESCAPE.sub(plain, inner.encode()).decode(errors="replace")
