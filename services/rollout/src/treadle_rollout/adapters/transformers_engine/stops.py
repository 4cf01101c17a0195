"""Which tokens end a turn."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from treadle_core.errors import InvalidFieldError

_FIELD = "engine.stop_tokens"


def stop_token_ids(
    folder: Path, stop_tokens: Iterable[str | int] | None, *, vocabulary: int
) -> frozenset[int]:
    """Ids of `stop_tokens`, or of the tokenizer's and the generation config's end of sequence.

    Raises:
        InvalidFieldError: a token is unknown, or nothing in the folder says what ends a turn.
    """
    if stop_tokens is None:
        ids = _declared(folder)
        if not ids:
            raise InvalidFieldError(_FIELD, limit="an end of sequence in the folder", value="none")
    else:
        ids = {token if isinstance(token, int) else _id(folder, token) for token in stop_tokens}
    for token in ids:
        if not 0 <= token < vocabulary:
            raise InvalidFieldError(_FIELD, limit=f"0 to {vocabulary - 1}", value=token)
    return frozenset(ids)


def _declared(folder: Path) -> set[int]:
    ids: set[int] = set()
    if (folder / "generation_config.json").is_file():
        declared: Any = GenerationConfig.from_pretrained(folder, local_files_only=True)
        eos: int | list[int] | None = declared.eos_token_id
        ids |= {eos} if isinstance(eos, int) else set(eos or ())
    if (folder / "tokenizer.json").is_file():
        end: Any = _tokenizer(folder).eos_token_id
        ids |= {end} if isinstance(end, int) else set()
    return ids


def _id(folder: Path, token: str) -> int:
    found = _tokenizer(folder).get_vocab().get(token)
    if found is None:
        raise InvalidFieldError(_FIELD, limit="tokens of the tokenizer", value=token)
    return int(found)


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
