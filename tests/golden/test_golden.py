import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.processes


def golden(path=None):
    """Exit status and measures of the program."""
    environment = os.environ | ({"GOLDEN": str(path)} if path else {})
    command = [sys.executable, str(HERE / "main.py")]
    answer = subprocess.run(command, env=environment, capture_output=True, check=False, text=True)
    rows = [json.loads(line) for line in answer.stdout.splitlines()]
    return answer.returncode, {row["measure"]: row["value"] for row in rows}, answer.stderr


def test_every_public_case_holds_in_both_precisions():
    status, measures, said = golden()
    assert measures == {"golden_cases": 700, "golden_functions": 19, "golden_failures": 0}, said
    assert status == 0


def test_what_is_not_offered_not_refused_refused_or_wrong_is_a_failure(tmp_path):
    document = json.loads((HERE / "public.json").read_text())
    by_function = {case["function"]: case for case in document["cases"]}
    whiten, invalid = by_function["whiten"], by_function["kl_estimate"]
    assert "raises" in invalid["expect"]
    wrong = json.loads(json.dumps(whiten))
    wrong["expect"]["values"][0][0] += 1e-3
    unasked = {**invalid, "expect": {"kl_mean": 0.0}}
    tame = {**invalid, "params": {**invalid["params"], "as_loss": 0}}
    unknown = {**whiten, "function": "cast_spell"}
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**document, "cases": [wrong, unasked, tame, unknown]}))
    status, measures, said = golden(path)
    assert measures["golden_failures"] == 8, said
    assert status == 1


GARBAGE = ["NaN", "Infinity", "-Infinity", 1e30, -1e30]


def spoil(case, rng):
    """Puts garbage wherever the mask is 0, and each row in a micro-batch of its own, shuffled."""
    mask = case["inputs"].get("action_mask", [])
    for name, rows in case["inputs"].items():
        is_matrix = isinstance(rows, list) and rows and isinstance(rows[0], list)
        if name == "action_mask" or not is_matrix or list(map(len, rows)) != list(map(len, mask)):
            continue
        for row, flags in zip(rows, mask, strict=True):
            for place, on in enumerate(flags):
                head = row[place] if isinstance(row[place], list) else None
                if not on:
                    row[place] = rng.choice(GARBAGE)
                if not on and head is not None:
                    row[place] = [rng.choice(GARBAGE) for _ in head]
    if "partition" in case["params"]:
        rows = [row for rank in case["params"]["partition"] for part in rank for row in part]
        rng.shuffle(rows)
        case["params"]["partition"] = [[[row] for row in rows[i::2]] for i in range(2)]


def test_garbage_off_the_mask_and_another_partition_change_no_case(tmp_path):
    document = json.loads((HERE / "public.json").read_text())
    rng = random.Random(1)  # noqa: S311
    before = json.dumps(document)
    for case in document["cases"]:
        spoil(case, rng)
    assert json.dumps(document).count("NaN") > 2 * before.count("NaN")
    path = tmp_path / "spoiled.json"
    path.write_text(json.dumps(document))
    status, measures, said = golden(path)
    assert measures["golden_failures"] == 0, said
    assert status == 0
