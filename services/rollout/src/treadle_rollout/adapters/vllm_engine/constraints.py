"""Whether vLLM can hold turns to a schema or a grammar."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def follows(folder: Path, stops: frozenset[int], vocabulary: int) -> bool:
    """VLLM can, with this folder's tokenizer, and what it ends a text with ends a turn here.

    It takes no tokenizer whose pieces are characters: its core would end by the first grammar.
    """
    import llguidance.hf  # noqa: PLC0415

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    try:
        llguidance.hf.from_tokenizer(tokenizer, max(vocabulary, len(tokenizer)))
    except ValueError:
        return False
    return tokenizer.eos_token_id in stops
