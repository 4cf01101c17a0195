"""Regenerates the Python contract in place, without installing anything."""

import importlib.util
from pathlib import Path

PROTOS = Path(__file__).parent.parent / "protos"


def main() -> None:
    """Runs what the build of treadle-protos runs."""
    spec = importlib.util.spec_from_file_location("generate", PROTOS / "generate.py")
    if spec is None or spec.loader is None:
        raise SystemExit("protos/generate.py is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.generate(PROTOS)


if __name__ == "__main__":
    main()
