"""`make docs-check`: every command in a document is run, and what can be checked is.

Commands run in a copy of the working tree, in the order in which each document says them, one shell
state a document. Lines for people on stderr; on stdout one JSON object a measure. Exit status 1
where a goal does not hold. A command is run as it stands, but that `SHORTER` adds settings to it;
those in `COVERED` are run by another proof.
"""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import yaml
from documents import Block, Command, blocks, broken_links, commands
from lines import distributions, lines_of_code, reading_path
from pydantic import ValidationError
from small_run import SERVICES

from treadle_runtime.config import ServiceConfig
from treadle_runtime.measures import Measure, report

ROOT = Path(__file__).parent.parent
METRICS = ROOT / "docs" / "metrics.md"
_LIMIT_S = 120
_NEAR = 0.05
"""How far off a count of lines that says `about` may be, as a share."""

COVERED = {
    r"make (setup|fmt|check|test|protos)( .*)?": ".ci/run",
    r"make (chaos|model-tests|test-py312)": ".ci/run",
    r"treadle train examples/coding/.*": "examples/tests/test_coding.py",
    r"python examples/coding/make_policy\.py": "examples/tests/test_coding.py",
    r"make [a-z-]+( [A-Z_]+=\S+)*": "Makefile",
    r"pytest .*": "Makefile",
    r"bash \.ci/run": ".ci/run",
    r"python tools/(lines|pants|docs|protos|containers)\.py.*": "Makefile",
    r"python (services/.*/benches|tools)/(engine|throughput|window|step|overlap)\.py.*": "Makefile",
    r"python services/experience/benches/(growth|store|recovery|trainable)\.py.*": "Makefile",
    r"python services/.*/benches/(refit|vllm_engine)\.py.*": "Makefile",
    r"python libs/payloads/benches/(upload|fetch|far)\.py.*": "Makefile",
    r"python services/experience/benches/peers/plane\.py.*": "Makefile",
    r"python tools/learning\.py .*": "docs/learning.json",
    r"python tools/stopped_trainer\.py.*": "tests/chaos/test_proofs.py",
    r"python tools/chaos\.py --containers .*": "tests/integration/test_container_nemesis.py",
    r"python -m treadle_experience\.main .*": "services/experience/tests/test_main.py",
    r"treadle restore .*": "services/experience/tests/test_failover.py",
    r"python -m treadle_refit\.main .*": "services/refit/tests/test_main.py",
    r"python -m treadle_rollout\.main .*": "tests/e2e/test_train.py",
    r"python -m treadle_trainer\.main .*": "tests/e2e/test_train.py",
    r"torchrun .*-m treadle_trainer\.main .*": "services/trainer/tests/test_rank_processes.py",
    r"treadle (export|replay) .*": "tests/e2e/test_ranks.py",
    r"treadle sft recipes/calculator-sft\.yaml .*": "examples/calculator/demo.py",
    r"treadle sft sft\.yaml": "services/trainer/tests/test_sft.py",
}
"""Commands that are too long, or need what only a test sets up: pattern, and the file that runs
them. Of `make`, that the target exists is checked here."""

SHORTER = {
    "treadle train recipes/calculator.yaml": (
        "experience.steps=2 experience.tasks_per_step=4 experience.group_size=4 "
        "experience.evaluation=null rollout.slots=16"
    ),
    "treadle sft warmup.yaml": "steps=5",
    "treadle train recipe.yaml": "experience.steps=2 experience.evaluation=null",
    "treadle doctor recipe.yaml": "run.dir=runs/other",
}
"""Settings added to a command that begins so: the same in less time, beside what it made."""

NAMES = {"RUN": "runs/demo", "step-000060": "step-000002"}
"""What stands for a word: the README makes the run, and `SHORTER` its last step."""


def main() -> int:
    """Checks all documents; 0 where all goals hold."""
    start = time.monotonic()
    texts = {path: path.read_text(encoding="utf-8") for path in documents()}
    # A changelog tells what there was; it tells nobody what to type.
    told = {path: text for path, text in texts.items() if path.name != "CHANGELOG.md"}
    found = [command for path, text in told.items() for command in commands(path, text)]
    broken = [(path, link) for path, text in texts.items() for link in broken_links(path, text)]
    wrong = [*wrong_blocks(texts), *wrong_counts(texts[ROOT / "README.md"])]
    for path, link in broken:
        say(path, 0, f"no {link}")
    with tempfile.TemporaryDirectory(prefix="treadle-docs-") as scratch:
        tree = Path(scratch) / "tree"
        failed, ran = run_all(found, tree)
        wrong += unknown_keys(tree, texts[METRICS])
    for path, line, why in wrong:
        say(path, line, why)
    return report(
        [
            Measure("docs_documents", len(texts), "documents"),
            Measure("docs_commands", len(found), "commands"),
            Measure("docs_commands_run", ran, "commands", ">= 1"),
            Measure("docs_commands_failed", failed, "commands", "== 0"),
            Measure("docs_links_broken", len(broken), "links", "== 0"),
            Measure("docs_statements_wrong", len(wrong), "statements", "== 0"),
            Measure("docs_seconds", round(time.monotonic() - start, 1), "s"),
        ]
    )


def documents() -> list[Path]:
    """Everything that a reader is sent to."""
    patterns = ("*.md", "docs/**/*.md", "services/*/README.md", "deploy/*.md", "examples/**/*.md")
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def say(path: Path, line: int, what: str) -> None:
    """One complaint on stderr."""
    print(f"{path.relative_to(ROOT)}:{line}: {what}", file=sys.stderr, flush=True)


# Commands


def run_all(found: list[Command], tree: Path) -> tuple[int, int]:
    """Runs each document's commands in a copy of the tree; returns how many failed and ran."""
    copy_tree(tree)
    failed = ran = 0
    shells: dict[Path, Shell] = {}
    for command in found:
        why = None
        if proof := covered(command.text):
            why = lacks(command, proof)
        elif command.inline and command.text.startswith("treadle "):
            why = lacks(command, "")  # the name of a command, not a call
        else:
            if command.document not in shells:
                shells[command.document] = Shell(tree, len(shells))
            why = shells[command.document].run(command.text)
            ran += 1
        if why is not None:
            failed += 1
            say(command.document, command.line, f"{command.text}: {why}")
    return failed, ran


def covered(text: str) -> str | None:
    """The file that runs a command elsewhere."""
    return next((proof for form, proof in COVERED.items() if re.fullmatch(form, text)), None)


def lacks(command: Command, proof: str) -> str | None:
    """What a command that is not run here needs and does not find."""
    words = command.text.split()
    if not (ROOT / proof).exists():
        return f"covered by {proof}, which is missing"
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        missing = [word for word in targets if not re.search(rf"^{word}:", makefile, re.MULTILINE)]
        return f"no target {', '.join(missing)}" if missing else None
    if words[0] == "treadle":
        names = {point.name for point in entry_points(group="treadle.commands")}
        return None if words[1] in names or words[1].isupper() else "no such command"
    if words[0] == "python" and words[1].endswith(".py") and not (ROOT / words[1]).exists():
        return f"no {words[1]}"
    return None


def copy_tree(tree: Path) -> None:
    """Copies what git would commit, and lends it the environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],  # noqa: S607
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    (tree / ".venv").symlink_to(ROOT / ".venv")


class Shell:
    """Runs the commands of one document.

    Each runs in the directory and with the variables that the one before it left.
    """

    def __init__(self, tree: Path, number: int) -> None:
        self._state = tree.parent / f"state-{number}"
        self._state.mkdir()
        (self._state / "env").write_text("")
        (self._state / "cwd").write_text(str(tree))
        home = tree.parent / "home"
        home.mkdir(exist_ok=True)
        path = f"{tree}/.venv/bin:{os.environ['PATH']}"
        self._env = os.environ | {"PATH": path, "HOME": str(home)}

    def run(self, text: str) -> str | None:
        """Runs one command; says why it failed, with the end of what it printed."""
        for begin, more in SHORTER.items():
            if text.startswith(begin):
                text += f" {more}"
        for name, stands in NAMES.items():
            text = re.sub(rf"\b{name}\b", stands, text)
        keep = f"pwd >{self._state}/cwd; export -p >{self._state}/env"
        script = f'cd "$(cat {self._state}/cwd)"\n. {self._state}/env\nset -e\n{text}\n{keep}\n'
        started = time.monotonic()
        process = subprocess.Popen(  # noqa: S603, what our documents say
            ["bash", "-c", script],  # noqa: S607
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            return f"not done after {_LIMIT_S} s\n{out[-2000:]}"
        print(f"{time.monotonic() - started:6.1f} s  {text}", file=sys.stderr, flush=True)
        return f"exit status {process.returncode}\n{out[-2000:]}" if process.returncode else None


# Statements

Complaint = tuple[Path, int, str]


def wrong_blocks(texts: dict[Path, str]) -> Iterator[Complaint]:
    """Python that does not compile or run, YAML that does not parse or is not a configuration."""
    for path, text in texts.items():
        for block in blocks(text):
            check = {"python": wrong_python, "yaml": wrong_yaml, "json": wrong_json}
            if block.language in check and (why := check[block.language](path, block)):
                yield path, block.line, why


def wrong_python(_: Path, block: Block) -> str | None:
    """Compiles a block, and runs one that imports what it needs."""
    try:
        tree = ast.parse(block.text)
    except SyntaxError as error:
        return str(error)
    if not isinstance(tree.body[0], ast.Import | ast.ImportFrom):
        return None
    ran = subprocess.run(  # noqa: S603, what our documents say
        [sys.executable, "-W", "error", "-c", block.text],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=_LIMIT_S,
    )
    return ran.stderr.strip().splitlines()[-1] if ran.returncode else None


def wrong_yaml(path: Path, block: Block) -> str | None:
    """Parses a block; a service's README shows its configuration, other documents a recipe's."""
    try:
        value: Any = yaml.safe_load(block.text)
    except yaml.YAMLError as error:
        return str(error)
    if not isinstance(value, dict):
        return None
    values = cast("dict[str, Any]", value)
    if path.parent.name in SERVICES and "listen" in values:
        return wrong_settings(path.parent.name, values)
    sections = {name: part for name, part in values.items() if name in SERVICES}
    recipe = yaml.safe_load((ROOT / "recipes" / "calculator.yaml").read_text(encoding="utf-8"))
    run = {"id": "docs", "dir": "runs/docs", "model": "examples/calculator/policy"}
    found = [
        wrong_settings(name, {"run": run, "listen": "unix:docs.sock", **recipe[name], **part})
        for name, part in sections.items()
    ]
    return "; ".join(why for why in found if why) or None


def wrong_settings(service: str, values: dict[str, Any]) -> str | None:
    """Why a service would refuse its configuration; addresses of peers may be left out."""
    (point,) = entry_points(group="treadle.services", name=service)
    schema: type[ServiceConfig] = point.load()
    peers = {name: "unix:docs.sock" for name in schema.model_fields if name.endswith("_address")}
    try:
        schema.model_validate(peers | values)
    except ValidationError as error:
        return str(error)
    return None


def wrong_json(_: Path, block: Block) -> str | None:
    """Parses a block of one value, or of one a line."""
    try:
        json.loads(block.text)
    except ValueError:
        try:
            for line in block.text.splitlines():
                json.loads(line)
        except ValueError as error:
            return str(error)
    return None


def unknown_keys(tree: Path, text: str) -> Iterator[Complaint]:
    """Keys that the runs of the documents logged, and docs/metrics.md does not name."""
    # `tasks_STATE` names all keys that begin with `tasks_`, `turns.LABEL` those with `turns.`.
    words = re.findall(r"\w+(?:\.\w+)*", text)
    forms = {re.sub(r"(?<=[_.])[A-Z]+$", r"[\\w.]+", word) for word in words}
    known = re.compile("|".join(sorted(forms)))
    seen: set[tuple[str, str]] = set()
    for path in sorted(tree.glob("runs/*/metrics/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row: dict[str, object] = json.loads(line)
            seen.update((path.name, key) for key in row if not known.fullmatch(key))
    for name, key in sorted(seen):
        yield METRICS, 1, f"does not name the key {key} of {name}"


def wrong_counts(readme: str) -> Iterator[Complaint]:
    """Counts of lines of code that the README says and `tools/lines.py` does not."""
    path = reading_path(readme)
    counts = {
        r"about ([\d,]+) lines of code without": sum(map(lines_of_code, path)),
        r"about ([\d,]+) lines of code in libs and services": sum(distributions().values()),
    }
    for form, count in counts.items():
        for said in re.finditer(form, readme):
            if abs(int(said[1].replace(",", "")) - count) > _NEAR * count:
                line = readme.count("\n", 0, said.start()) + 1
                yield ROOT / "README.md", line, f"says {said[1]} lines of code, there are {count:,}"


if __name__ == "__main__":
    sys.exit(main())
