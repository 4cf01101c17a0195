"""`treadle failpoints`: lists every place at which a service can be told to fail."""

import argparse
from importlib.util import find_spec
from pathlib import Path

from treadle_cli.compose import SERVICES, SIDECAR
from treadle_runtime.failpoints import names_in


def main(argv: list[str]) -> int:
    """Prints the names, one a line, as they are called in the installed services."""
    argparse.ArgumentParser(prog="treadle failpoints", description=main.__doc__).parse_args(argv)
    for name in names_in(_sources()):
        print(name)
    return 0


def _sources() -> list[Path]:
    """Every file of the installed services, and of the sidecar."""
    files: list[Path] = []
    for service in (*SERVICES, SIDECAR):
        spec = find_spec(f"treadle_{service}")
        for place in (spec.submodule_search_locations or []) if spec else []:
            files += sorted(Path(place).rglob("*.py"))
    return files
