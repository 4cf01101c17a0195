"""Fixtures: the harness of the end-to-end tests."""

import importlib.util
import sys
from pathlib import Path

if "e2e_conftest" not in sys.modules:
    _path = Path(__file__).parent.parent / "e2e" / "conftest.py"
    _spec = importlib.util.spec_from_file_location("e2e_conftest", _path)
    assert _spec is not None
    assert _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["e2e_conftest"] = _module
    _spec.loader.exec_module(_module)

make_run = sys.modules["e2e_conftest"].make_run
