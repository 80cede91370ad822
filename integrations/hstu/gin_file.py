"""The settings in a gin file (github.com/google/gin-config), as far as they are plain values.

A line of gin may go on inside brackets or behind a backslash, and `#` begins a comment outside of a string: the tokens are Python's.
Imports only register what can be set. A statement that could set something in a way that is not read here is refused with its line.
"""

import ast
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from tokenize import TokenInfo
from typing import Any, NoReturn

from cluster.errors import ConfigError

_LAYOUT = {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT}
_ENDS = {tokenize.NEWLINE, tokenize.ENDMARKER}
_NOT_READ = (ValueError, SyntaxError, RecursionError, MemoryError)
"""What Python raises at text that is no value, the last two at one that is nested too deeply."""


@dataclass(frozen=True, slots=True)
class Setting:
    """`scope`/`module`.`name`.`parameter` = `text`, on this line of the file; scope and module are often empty."""

    path: Path
    line: int
    scope: str
    module: str
    name: str
    parameter: str
    text: str

    @property
    def key(self) -> str:
        return f"{self.name}.{self.parameter}"

    @property
    def value(self) -> Any:
        """The value. Raises ConfigError where it is computed, as from a macro or another setting."""
        try:
            return ast.literal_eval(self.text)
        except _NOT_READ:
            self.refuse(f"{self.key} = {_shown(self.text)} is no number, string or truth value; write the value itself")

    def refuse(self, why: str) -> NoReturn:
        raise ConfigError(f"{self.path}, line {self.line}: {why}")


def read_settings(path: Path, text: str) -> list[Setting]:
    """The settings in the file's order: of two for one parameter gin takes the later one. Raises ConfigError that names the line."""
    found = (_setting(path, tokens) for tokens in _statements(path, text))
    return [setting for setting in found if setting]


def _statements(path: Path, text: str) -> Iterator[list[TokenInfo]]:
    statement: list[TokenInfo] = []
    line = 1
    try:
        for token in tokenize.generate_tokens(StringIO(text).readline):
            line = token.start[0]
            if token.type in _ENDS:
                if statement:
                    yield statement
                statement = []
            elif token.type not in _LAYOUT and not token.string.isspace():
                statement.append(token)
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}") from error
    except tokenize.TokenError as error:
        began = statement[0].start[0] if statement else line
        raise ConfigError(f"{path}, line {began}: what begins here does not end ({error.args[0]})") from error


def _setting(path: Path, tokens: Sequence[TokenInfo]) -> Setting | None:
    """The setting that a statement makes; None where it makes none."""
    line, words = tokens[0].start[0], [token.string for token in tokens]
    where, shown = f"{path}, line {line}", _shown(tokens[0].line.strip())
    if "=" not in words:
        _refuse_unless_import(where, shown, words)
        return None
    equals = words.index("=")
    target, text = "".join(words[:equals]), _source(tokens[equals + 1 :])
    *scopes, selector = target.split("/")
    parts = selector.split(".")
    if not all(part.isidentifier() for part in (*scopes, *parts)) or not _is_one_value(tokens[equals + 1 :]):
        raise ConfigError(f"{where}: {shown!r} is no setting; write NAME.PARAMETER = VALUE")
    if len(parts) == 1:  # a macro, which a setting that names it is refused for
        return None
    *modules, name, parameter = parts
    return Setting(path, line, "/".join(scopes), ".".join(modules), name, parameter, text)


def _is_one_value(tokens: Sequence[TokenInfo]) -> bool:
    """Whether the tokens are one value from the first to the last: one of Python's, or with references (@) and macros (%) in its places."""
    try:
        ast.parse(_source([token for token in tokens if token.string not in {"@", "%"}]), mode="eval")
    except _NOT_READ:
        return False
    return True


def _shown(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _source(tokens: Sequence[TokenInfo]) -> str:
    """The tokens' text on one line, with the blanks that are between them in the file."""
    gaps = [after.start[1] - before.end[1] if after.start[0] == before.end[0] else 1 for before, after in pairwise(tokens)]
    return "".join(token.string + " " * gap for token, gap in zip(tokens, [*gaps, 0], strict=False))


def _refuse_unless_import(where: str, shown: str, words: Sequence[str]) -> None:
    first = words[0]
    if first == "include":
        raise ConfigError(f"{where}: {shown} is not followed; write the lines of that file in its place")
    if words[-1] == ":":
        raise ConfigError(f"{where}: a block of settings ({shown!r}) is not read; write NAME.PARAMETER = VALUE on each of its lines")
    if first not in {"import", "from"}:
        raise ConfigError(f"{where}: {shown!r} is no setting; write NAME.PARAMETER = VALUE")
    if "as" in words:
        raise ConfigError(f"{where}: {shown} gives another name to what is set below; name it as Meta's code does")
