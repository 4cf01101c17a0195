"""Every row of the catalogue of broken calls has a test against a real service, under its name.

| row | what is sent | where |
|---|---|---|
| G1 | a message beyond the limit | test_grpc, test_refit |
| G2 | a stream of more than was declared | libs/payloads/tests: only uploads are streams |
| G3 | an empty id | test_grpc |
| G4 | an id that is a path or a subject | test_grpc |
| G5 | a negative length, index or count | test_grpc, test_results |
| G6 | arrays of other lengths than the tokens | test_results |
| G7 | no trained token | test_results: taken, and counted |
| G8 | a reward that is no number | test_results, test_grpc |
| G9 | a log-probability that cannot be | test_results |
| G10 | a token that is none | test_results; beyond the vocabulary the trainer refuses it |
| G11 | a type or shape that the bytes are not | test_results |
| G12 | a shape of 2^60 elements | test_results |
| G13 | pickle, or numpy's format for objects | test_results, test_grpc |
| G14 | an enum unset or unknown | test_grpc, test_results |
| G18 | a version that is not registered | test_grpc, test_results |
| G19 | a ticket beyond the lag bound | test_grpc: none is issued |
| G20 | an id again, with the same and another digest | test_results |
| G21 | a stale epoch or attempt | test_grpc, test_results |
| G22 | a member beyond the group | test_results |
| G23 | no deadline, or a very long one | test_grpc |
| G24 | a call that is cancelled | test_grpc |
| G25 | bytes of another digest | test_results |
| G26 | a compressed bomb | test_grpc |
| G27 | nesting without end, and very many keys | test_grpc, test_results |
| G28 | a newer contract | test_grpc |
| G29 | text that is no UTF-8 | test_grpc, test_refit |
| G30 | more calls at once than are served | test_grpc |
| G31 | a medium that cannot be | test_results |
| G32 | spans of media that cannot be, or that name others than the result | test_results |
| G33 | a medium that is not in the store | test_results |

G15 to G17 are about identities, which nobody has yet: nothing listens beyond one machine.
"""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROWS = re.findall(r"^\| (G\d+) \| .* \| (.*) \|$", __doc__ or "", re.MULTILINE)


@pytest.mark.parametrize(("row", "where"), ROWS, ids=[row for row, _ in ROWS])
def test_a_row_is_tested_where_the_table_says(row: str, where: str) -> None:
    for name in re.findall(r"test_\w+", where):
        text = (HERE / f"{name}.py").read_text(encoding="utf-8")
        assert re.search(rf"\b(test_)?{row}(?=[_\"-])|\b{row}:", text, re.IGNORECASE), name


def test_the_table_is_whole() -> None:
    assert [row for row, _ in ROWS] == [f"G{n}" for n in range(1, 34) if n not in (15, 16, 17)]
