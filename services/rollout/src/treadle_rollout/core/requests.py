"""What an engine may be asked for."""

import numpy as np

from treadle_core.errors import InvalidFieldError
from treadle_rollout.core.errors import ContextOverflowError
from treadle_rollout.ports import GenerationRequest


def check_request(request: GenerationRequest, *, vocabulary: int, max_context: int) -> None:
    """Raises InvalidFieldError naming the field, or ContextOverflowError."""
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
    if sampling.max_tokens < 1:
        raise InvalidFieldError("max_tokens", limit=">= 1", value=sampling.max_tokens)
    if not 0 <= sampling.temperature < np.inf:
        limit = ">= 0 and finite"
        raise InvalidFieldError("temperature", limit=limit, value=sampling.temperature)
