"""What the documents say can be typed, fetched and followed: commands, paths and links, out of their Markdown.

A line of a fenced block is typed as it stands; a command in running text may be a part of one, so that less is asked of it.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import typer

from cluster.registry import resolve
from deployments.cli import COMMANDS

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")})
SHELLS = {"", "sh", "bash", "console"}
MARK = "# not run in CI: "
PLACEHOLDERS = {"...", "…"}
WRAPPERS = {"time", "exec", "sudo", "do", "nohup", "!"}
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_PATH = re.compile(r"(?<![A-Za-z.])(/(?:v1/[\w/{}.:~-]+|healthz|readyz|openapi\.json))")
_MODULE = re.compile(r"\bpython3? -m ([\w.]+)")
_SCRIPT = re.compile(r"\bpython3? ([\w./-]+\.py)\b")
_TARGET = re.compile(r"(?:^|`)make ([a-z][\w-]*)", re.MULTILINE)
USAGE_ERROR = typer.BadParameter.__mro__[1]
"""Of the click that typer brings or imports, as its version has it."""


@dataclass(frozen=True, slots=True)
class Command:
    """A call of `genrec`: its arguments, and whether they are all of them."""

    arguments: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return shlex.join(("genrec", *self.arguments))


def prose(text: str) -> str:
    """A document without its fenced blocks."""
    return _FENCE.sub("", text)


def shell_lines(text: str) -> Iterator[str]:
    """What is typed in the fenced blocks, a command a line, comments and all."""
    for language, block in _FENCE.findall(text):
        if language in SHELLS:
            yield from block.replace("\\\n", " ").splitlines()


def commands(text: str) -> Iterator[Command]:
    """All calls of `genrec` in a document."""
    for line in shell_lines(text):
        for words in _commands_of(line):
            yield Command(tuple(words), whole=not PLACEHOLDERS & set(words))
    for _, code in _INLINE.findall(prose(text)):
        for words in _commands_of(" ".join(code.split())):
            yield Command(tuple(words), whole=False)


def _commands_of(line: str) -> Iterator[list[str]]:
    """The arguments of each `genrec` that stands where a command begins, also within `$( )`."""
    try:
        words = [*_words(line), ";"]
    except ValueError:  # a quote that the next line closes, as in a body of JSON
        if re.match(r"(?:\S*/)?genrec\s", line):
            raise
        return
    call: list[str] = []
    for word in words:
        if "$(" in word:
            yield from _commands_of(word[word.index("$(") + 2 :].rstrip(")"))
        if set(word) <= set("();<>|&"):
            yield from _call(call[:-1] if word[0] in "<>" and call and call[-1].isdecimal() else call)
            call = ["of", "a", "file"] if word[0] in "<>" else []
        elif call or not (word in WRAPPERS or re.match(r"\w+=", word)):
            call.append(word)


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def _call(words: list[str]) -> Iterator[list[str]]:
    if words and words[0].rsplit("/", 1)[-1] == "genrec" and len(words) > 1:
        yield words[1:]


@cache
def _group(name: str) -> typer.core.TyperGroup:
    """The command line with this one command."""
    line = typer.Typer()
    line.callback()(lambda: None)
    command = resolve(COMMANDS[name])
    line.add_typer(command, name=name) if isinstance(command, typer.Typer) else line.command(name)(command)
    return typer.main.get_command(line)


def problem(command: Command) -> str:
    """Why the command line would not take it, "" where it would."""
    name, *rest = command.arguments
    if name.startswith("-"):
        return "" if command.arguments == ("--help",) else f"genrec has no option {name}"
    if name not in COMMANDS:
        return f"genrec has no command {name}; it has {', '.join(COMMANDS)}"
    found = _group(name).commands[name]
    while hasattr(found, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in found.commands:
            return f"{name} has no command {rest[0]}; it has {', '.join(found.commands)}"
        found, rest = found.commands[rest[0]], rest[1:]
    return _refusal(found, rest, whole=command.whole and not hasattr(found, "commands"))


def _refusal(found: typer.core.TyperCommand, arguments: list[str], *, whole: bool) -> str:
    """What the parser says; of a part, nothing that is missing counts, at the end an option's value neither."""
    try:
        if whole:
            found.make_context("genrec", list(arguments))
        else:
            given = [word for word in arguments if word not in PLACEHOLDERS]
            ends_in_option = given[-1:] != [] and given[-1].startswith("-") and "=" not in given[-1]
            context = found.context_class(found)
            found.make_parser(context).parse_args([*given, "value"] if ends_in_option else given)
    except typer.Exit:
        return ""  # --help
    except USAGE_ERROR as error:
        return error.format_message()
    return ""


def paths(text: str) -> set[str]:
    """The HTTP paths that a document names."""
    return {found.rstrip(".:,/") for found in _PATH.findall(text)}


def modules(text: str) -> set[str]:
    return set(_MODULE.findall(text))


def scripts(text: str) -> set[str]:
    return set(_SCRIPT.findall(text))


def targets(text: str) -> set[str]:
    return set(_TARGET.findall(text))


def links(text: str) -> set[str]:
    """Where relative links lead, with their anchors."""
    without_code = _INLINE.sub("", prose(text))
    linked = {*_LINK.findall(without_code), *_LINK.findall(prose(text))}
    return {link for link in linked if not re.match(r"[a-z]+:", link)}


def anchors(text: str) -> set[str]:
    """The names that GitHub gives a document's headings."""
    seen: dict[str, int] = {}
    found = set()
    for heading in _HEADING.findall(prose(text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return found
