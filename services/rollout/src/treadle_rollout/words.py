"""The tokenizer of a policy, raw."""

from tokenizers import Tokenizer

from treadle_agents.loop import Words


def words_of(path: str) -> Words:
    """The words of a `tokenizer.json`: nothing is added, skipped, cut or padded."""
    tokenizer = raw(path)
    return Words(
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
    )


def raw(path: str) -> Tokenizer:
    """A tokenizer that neither cuts nor pads."""
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
