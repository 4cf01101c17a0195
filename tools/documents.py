"""What a Markdown document says that can be wrong: commands, code, links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMMANDS = (
    *("bash", "cat", "cd", "cp", "export", "git", "ls", "make", "mkdir", "pip", "pytest", "python"),
    *("source", "tensorboard", "treadle"),
)
"""First words of a line in an indented block that is a command, and not its output or a table."""
_INLINE = re.compile(r"`((?:make|treadle|python|pytest|bash) [^`]+)`")
_LINK = re.compile(r"(?<!`)\[[^]]*\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, or an indented one (`language` is empty), from a line of a document."""

    line: int
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """One command and where it is said; `inline` in a sentence, else in a block."""

    document: Path
    line: int
    text: str
    inline: bool = False


def blocks(text: str) -> Iterator[Block]:
    """Fenced and indented blocks, in order. What is indented below a list is part of the list."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        start = at
        if fence := re.match(r"```+", lines[at]):
            at += 1
            while at < len(lines) and not lines[at].startswith(fence[0]):
                at += 1
            language = lines[start].removeprefix(fence[0]).strip()
            yield Block(start + 2, language, "\n".join(lines[start + 1 : at]))
        elif lines[at].startswith("    ") and (at == 0 or _opens(lines[at - 1])):
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at]):
                at += 1
            at -= 1
            inside = "\n".join(line[4:] for line in lines[start : at + 1])
            yield Block(start + 1, "", inside.rstrip("\n"))
        at += 1


def _opens(before: str) -> bool:
    return not before or before.startswith("#")


def commands(document: Path, text: str) -> list[Command]:
    """Every command, in order: those of blocks, and those that a sentence names."""
    found: list[Command] = []
    inside: set[int] = set()
    for block in blocks(text):
        inside.update(range(block.line - 1, block.line + block.text.count("\n") + 2))
        found += [Command(document, block.line + offset, line) for offset, line in _of_block(block)]
    for number, line in enumerate(text.splitlines(), start=1):
        if number not in inside:
            found += [
                Command(document, number, said, inline=True) for said in _INLINE.findall(line)
            ]
    return sorted(found, key=lambda command: command.line)


def _of_block(block: Block) -> Iterator[tuple[int, str]]:
    """A fenced block without prompts is one script; else lines with a prompt or a known word."""
    if block.language not in ("", "sh", "bash", "shell", "console"):
        return
    lines = block.text.splitlines()
    if block.language and not any(line.startswith("$ ") for line in lines):
        yield 0, block.text
        return
    for offset, line in enumerate(lines):
        said = line.removeprefix("$ ")
        if said != line or said.partition(" ")[0] in COMMANDS:
            # After two spaces comes what it does.
            yield offset, re.split(r"\s{2,}| #", said, maxsplit=1)[0].strip()


def links(text: str) -> list[str]:
    """Targets of links and pictures outside of blocks."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [either or other for either, other in _LINK.findall(plain)]


def broken_links(document: Path, text: str) -> list[str]:
    """Relative links whose file, or heading in a file, does not exist."""
    broken: list[str] = []
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        path = document.parent / name if name else document
        if not path.exists() or (
            anchor and path.suffix == ".md" and anchor not in anchors(path.read_text("utf-8"))
        ):
            broken.append(link)
    return broken


def anchors(text: str) -> set[str]:
    """Names by which the headings of a document can be linked to."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in _HEADING.findall(text)
    }
