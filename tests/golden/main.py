"""`make golden`: golden cases of reinforcement learning, through the trainer's own functions.

Each case is run in float64 and in float32. `GOLDEN=FILE` takes another file of the same schema
(rl-golden/1.x; README.md beside this file). A case that is refused where numbers were expected,
answered where a refusal was, or not offered, counts as a failure. One JSON line a measure on
stdout; what fails, and which of several accepted answers was taken, on stderr.
"""

import json
import math
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from adapter import Adapter

from treadle_core.errors import InvalidFieldError
from treadle_runtime.measures import Measure, report

PUBLIC = Path(__file__).parent / "public.json"
SCHEMA = "rl-golden/1."
SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
FINITE = ("advantages", "returns", "values", "coef", "grad", "token_grad")
"""Outputs that are finite off the mask, too."""

Case = dict[str, Any]
Function = Callable[[Case, Case], Case]


def main(path: Path) -> int:
    """Runs all cases of a file; returns the exit status."""
    torch.set_num_threads(1)
    document = json.loads(path.read_text(encoding="utf-8"))
    if not document["schema"].startswith(SCHEMA):
        sys.stderr.write(f"{path}: expected schema {SCHEMA}x, got {document['schema']}\n")
        return 2
    cases, failures, functions = document["cases"], 0, set[str]()
    for precision in ("fp64", "fp32"):
        offered = Adapter(precision).functions()
        for case in cases:
            tolerance = document["default_tolerance"][precision]
            tolerance = case.get("tolerance", {}).get(precision, tolerance)
            functions.add(case["function"])
            failed, note = outcome(case, offered.get(case["function"]), tolerance)
            failures += failed
            if note:
                word = "FAIL" if failed else "note"
                sys.stderr.write(f"{word} {precision} {case['id']} {case['tags']}: {note}\n")
    return report(
        [
            Measure("golden_cases", len(cases) * 2, "cases in two precisions", ">= 1"),
            Measure("golden_functions", len(functions), "functions", ">= 1"),
            Measure("golden_failures", failures, "cases", "== 0"),
        ]
    )


def outcome(case: Case, function: Function | None, tolerance: Case) -> tuple[bool, str]:
    """Whether a case fails, and what is to be said about it."""
    if function is None:
        return True, f"{case['function']} is not offered"
    accepted = [case["expect"], *(each["expect"] for each in case.get("alternatives", ()))]
    refusable = any("raises" in each for each in accepted)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = function(decoded(case["inputs"]), decoded(case["params"]))
    except InvalidFieldError as error:
        return not refusable, "" if refusable else f"refused: {error}"
    except Exception as error:  # noqa: BLE001
        return True, f"raised {error!r}"  # no refusal, which has a type
    said = [differs(case, found, decoded(each), tolerance) for each in accepted]
    if None not in said:
        return True, str(said[0])
    chosen = said.index(None)
    return False, f"took: {case['alternatives'][chosen - 1]['why']}" if chosen else ""


def differs(case: Case, found: Case, expected: Case, tolerance: Case) -> str | None:
    """The first difference from one accepted outcome, or None."""
    if "raises" in expected:
        return "was not refused"
    mask = case["inputs"].get("action_mask")
    for name, value in expected.items():
        got, wanted = found.get(name), value
        if got is None and wanted is not None:
            if name in case.get("optional_outputs", ()):
                continue
            return f"{name} is missing"
        if name in case.get("masked_outputs", ()):
            if name in FINITE and not all(math.isfinite(x) for row in got for x in row):
                return f"{name} is not finite off the mask"
            got, wanted = on_mask(got, mask), on_mask(wanted, mask)
        if said := unequal(got, wanted, tolerance, name):
            return said
    return None


def on_mask(rows: Any, mask: Any) -> Any:
    """What lies on the mask, row by row."""
    return [
        [value for value, on in zip(row, flags, strict=True) if on]
        for row, flags in zip(rows, mask, strict=True)
    ]


def unequal(found: Any, wanted: Any, tolerance: Case, where: str) -> str | None:
    """How two values differ, or None: |found - wanted| <= atol + rtol |wanted|."""
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return f"{where}: {found!r} is no list of {len(wanted)}"
        pairs = enumerate(zip(found, wanted, strict=True))
        each = (unequal(a, b, tolerance, f"{where}[{i}]") for i, (a, b) in pairs)
        return next((said for said in each if said), None)
    if wanted is None or found is None or isinstance(wanted, str):
        same = found == wanted
    elif not math.isfinite(wanted) or not math.isfinite(found):
        same = found == wanted or (math.isnan(found) and math.isnan(wanted))
    else:
        same = abs(found - wanted) <= tolerance["atol"] + tolerance["rtol"] * abs(wanted)
    return None if same else f"{where}: {found!r}, expected {wanted!r}"


def decoded(value: Any) -> Any:
    """JSON with the numbers that it has no word for."""
    if isinstance(value, dict):
        return {name: decoded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [decoded(each) for each in value]
    return SPECIAL.get(value, value) if isinstance(value, str) else value


if __name__ == "__main__":
    sys.exit(main(Path(os.environ.get("GOLDEN") or PUBLIC)))
