"""What an engine may be asked for."""

from collections.abc import Mapping

import numpy as np

from treadle_agents.images.placeholders import ImageRule
from treadle_core.errors import InvalidFieldError
from treadle_core.media import check_spans
from treadle_core.tickets import Sampling
from treadle_rollout.core.errors import ContextOverflowError, UnsupportedImageError
from treadle_rollout.ports import GenerationRequest

MAX_BIASES = 1024
"""Most tokens that one call may bias."""

MAX_BIAS = 100.0
"""Largest magnitude of one bias."""

_RANGES: Mapping[str, tuple[float, float]] = {
    "top_p": (0.0, 1.0),
    "top_k": (0, np.inf),
    "min_p": (0.0, 1.0),
    "seed": (-(2**63), 2**64 - 1),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
"""Least and greatest value of each field."""


def check_request(
    request: GenerationRequest,
    *,
    vocabulary: int,
    max_context: int,
    samplings: frozenset[str] = frozenset(),
    images: ImageRule | None = None,
) -> None:
    """Raises InvalidFieldError naming the field, ContextOverflowError, or UnsupportedImageError.

    `samplings` are the optional fields of `Sampling` that the engine honours; `images` is how many
    tokens it takes an image for, None where it reads none.
    """
    ids, sampling = request.token_ids, request.sampling
    if ids.ndim != 1 or ids.size == 0 or ids.dtype != np.int32:
        shape = f"{ids.dtype.name} {list(ids.shape)}"
        raise InvalidFieldError("token_ids", limit="int32 [P], P >= 1", value=shape)
    if ids.size >= max_context:
        raise ContextOverflowError(prompt_tokens=ids.size, max_context=max_context)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        value = low if low < 0 else high
        raise InvalidFieldError("token_ids", limit=f"0 to {vocabulary - 1}", value=value)
    if request.media:
        _check_images(request, images)
    if sampling.max_tokens < 1:
        raise InvalidFieldError("max_tokens", limit=">= 1", value=sampling.max_tokens)
    if not 0 <= sampling.temperature < np.inf:
        limit = ">= 0 and finite"
        raise InvalidFieldError("temperature", limit=limit, value=sampling.temperature)
    if shaped := sampling.shaped:
        _check_shaped(sampling, shaped, vocabulary, samplings)


def _check_images(request: GenerationRequest, images: ImageRule | None) -> None:
    """Each is there, and takes as many tokens as the engine takes it for."""
    if images is None:
        raise UnsupportedImageError(len(request.media))
    check_spans(request.media, np.zeros(request.token_ids.size, np.bool_))
    for index, span in enumerate(request.media):
        picture = request.pictures.get(span.sha256)
        if picture is None:
            limit = "an image of the request"
            raise InvalidFieldError(f"media[{index}].sha256", limit=limit, value=span.sha256)
        tokens = images.tokens_of(picture.width, picture.height)
        if span.length != tokens:
            limit = f"{tokens} tokens for {picture.width} x {picture.height} pixels"
            raise InvalidFieldError(f"media[{index}].length", limit=limit, value=span.length)


def _check_shaped(
    sampling: Sampling, shaped: frozenset[str], vocabulary: int, samplings: frozenset[str]
) -> None:
    """The fields that are not off: honoured, and within their limits."""
    for name in sorted(shaped):
        value = getattr(sampling, name)
        if name not in samplings:
            limit = f"its default, since this engine honours {', '.join(sorted(samplings)) or 'no'}"
            raise InvalidFieldError(name, limit=f"{limit} other sampling", value=value)
        low, high = _RANGES.get(name, (0.0, 0.0))
        if name in _RANGES and not low <= value <= high:
            raise InvalidFieldError(name, limit=f"{low:g} to {high:g}", value=value)
    biases = sampling.logit_bias
    if len(biases) > MAX_BIASES:
        raise InvalidFieldError("logit_bias", limit=f"<= {MAX_BIASES} tokens", value=len(biases))
    for token, bias in biases.items():
        if not 0 <= token < vocabulary:
            limit = f"token ids of 0 to {vocabulary - 1}"
            raise InvalidFieldError("logit_bias", limit=limit, value=token)
        if not abs(bias) <= MAX_BIAS:
            raise InvalidFieldError("logit_bias", limit=f"within ±{MAX_BIAS:g}", value=bias)
