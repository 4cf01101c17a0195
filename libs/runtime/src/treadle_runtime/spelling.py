"""What somebody may have meant by a name that does not exist."""

import difflib
from collections.abc import Sequence


def did_you_mean(name: str, valid: Sequence[str], prefix: str = "") -> str:
    """The nearest valid name as the end of a sentence, or all of them where none is near."""
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {prefix}{near[0]}"
    return f"; valid here: {', '.join(sorted(valid))}" if valid else ""
