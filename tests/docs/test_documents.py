"""What a document says is found: a command that is missed is one that nobody runs."""

from pathlib import Path

import documents

TEXT = """# Title

    make demo     trains a policy
    $ treadle train x.yaml
    step 1/60

Say `treadle fsck RUN`, or:

    treadle report RUN    # one file
    table             of words

```sh
cat > a.py <<EOF
pass
EOF
```

See [this](#title), [that](#nothing) and [none](none.md).
"""


def said(text: str) -> list[str]:
    return [command.text for command in documents.commands(Path("x.md"), text)]


def test_commands_are_found_in_blocks_fences_and_sentences() -> None:
    assert said(TEXT) == [
        "make demo",
        "treadle train x.yaml",
        "treadle fsck RUN",
        "treadle report RUN",
        "cat > a.py <<EOF\npass\nEOF",
    ]


def test_links_to_files_and_headings_that_are_not_there_are_broken(tmp_path: Path) -> None:
    document = tmp_path / "x.md"
    document.write_text(TEXT)

    assert documents.broken_links(document, TEXT) == ["#nothing", "none.md"]
