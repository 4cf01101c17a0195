"""What the policy did on held-out tasks, read from the ledger of a finished run."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from treadle_experience.adapters.sqlite import FILE_NAME, read_journal
from treadle_experience.core.transitions import EpisodeDone, TaskOpened
from treadle_payloads.codec import decode_payload


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


def read_transcripts(run: Path, model: Path, evaluation: str) -> dict[int, list[Transcript]]:
    """The episodes of an evaluation set by the step that was scored, in the order of its tasks."""
    journal = [entry.transition() for entry in read_journal(run / FILE_NAME).entries]
    done = {t.episode_id: t for t in journal if isinstance(t, EpisodeDone)}
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found: dict[int, list[Transcript]] = {}
    for task in journal:
        if isinstance(task, TaskOpened) and task.evaluation == evaluation:
            (episode_id,) = task.episode_ids
            if episode_id in done:
                transcript = _transcript(task, done[episode_id], tokenizer)
                found.setdefault(task.step, []).append(transcript)
    return found


def _transcript(task: TaskOpened, ended: EpisodeDone, tokenizer: Tokenizer) -> Transcript:
    if ended.inline is None:
        raise ValueError(f"the ledger holds no payload of episode {ended.episode_id}")
    (segment,) = decode_payload(ended.inline)
    text = tokenizer.decode(segment.token_ids.tolist(), skip_special_tokens=False)
    said = text.removeprefix(str(task.spec["prompt"])).removesuffix("<|end|>")
    said = said.replace("<|end|><|tool|>", " -> ").replace("<|end|><|assistant|>", "  ")
    return Transcript(str(task.spec["expression"]), said, right=ended.result.reward == 1)
