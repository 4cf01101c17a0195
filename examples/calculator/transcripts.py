"""What the policy did on held-out tasks, read from the ledger of a finished run."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from treadle_experience.episodes_ledger import payloads_of, read_episodes, read_segments
from treadle_experience.transcripts import Piece, Words, pieces


@dataclass(frozen=True, slots=True)
class Transcript:
    """One scored episode."""

    expression: str
    said: str
    """Calls with what the calculator showed, then the answer."""
    right: bool

    @property
    def operations(self) -> int:
        """Calls that the expression needs."""
        return sum(character in "+-" for character in self.expression[1:])


def read_transcripts(run: Path, evaluation: str) -> dict[int, list[Transcript]]:
    """The episodes of an evaluation set by the step that was scored, in the order of its tasks."""
    words, store = Words.of_run(run), payloads_of(run)
    found: dict[int, list[Transcript]] = {}
    for record in read_episodes(run):
        if record.evaluation == evaluation and record.result:
            said = pieces(read_segments(record, store), words)
            right = record.result.reward == 1
            expression = str(record.spec["expression"])
            transcript = Transcript(expression, _in_a_line(said), right=right)
            found.setdefault(record.step, []).append(transcript)
    return found


def _in_a_line(said: Iterable[Piece]) -> str:
    text = "".join(piece.text for piece in said if piece.role != "prompt").removesuffix("<|end|>")
    return text.replace("<|end|><|tool|>", " -> ").replace("<|end|><|assistant|>", "  ")
