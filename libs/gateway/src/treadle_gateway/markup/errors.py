"""What is wrong with a model's folder."""

from treadle_core.errors import Kind, TreadleError


class UnsupportedTemplateError(TreadleError):
    """A chat template or tokenizer with which conversations cannot be recorded token by token."""

    kind = Kind.INVALID
    reason = "UNSUPPORTED_TEMPLATE"
