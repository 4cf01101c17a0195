"""Counts lines of code: those that hold a token other than a comment or a docstring.

usage: python tools/lines.py      one line each for a distribution, their sum, and the reading path
"""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_STEP = re.compile(r"^\d+\. \[[^]]+\]\(([^)]+)\):(.*)$", re.MULTILINE)


def lines_of_code(path: Path) -> int:
    """How many lines of one Python file hold code."""
    text = path.read_text(encoding="utf-8")
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        # A string that stands alone is a docstring: of a module, a class, a function or a field.
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                code.difference_update(range(first, last + 1))
            case _:
                pass
    return len(code)


def distributions() -> dict[str, int]:
    """Lines of code of what each distribution in libs and services installs."""
    return {
        f"{source.parent.parent.name}/{source.parent.name}": sum(
            lines_of_code(path) for path in source.rglob("*.py")
        )
        for source in sorted([*ROOT.glob("libs/*/src"), *ROOT.glob("services/*/src")])
    }


def reading_path(readme: str) -> list[Path]:
    """The files that the README's reading path names: a file, or a folder and its modules."""
    section = readme.partition("## Reading path")[2].partition("\n## ")[0]
    files: list[Path] = []
    for place, rest in _STEP.findall(section):
        modules = re.findall(r"`([^`]+)`", rest.partition(";")[2])
        files += [ROOT / place / f"{module}.py" for module in modules] or [ROOT / place]
    return files


def main() -> None:
    """Prints the counts."""
    counts = distributions()
    for name, count in counts.items():
        print(f"{count:7,} {name}")
    print(f"{sum(counts.values()):7,} libs and services")
    path = reading_path((ROOT / "README.md").read_text(encoding="utf-8"))
    print(f"{sum(lines_of_code(file) for file in path):7,} reading path")


if __name__ == "__main__":
    main()
