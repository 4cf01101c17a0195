from collections.abc import Sequence
from typing import ClassVar

from vllm.logprobs import FlatLogprobs

class WeightVersionSpan:  # since 0.32
    version: str
    start: int
    end: int

class CompletionOutput:
    __dataclass_fields__: ClassVar[dict[str, object]]
    token_ids: Sequence[int]
    logprobs: FlatLogprobs | None
    finish_reason: str | None
    weight_versions: list[WeightVersionSpan] | None  # since 0.32

class RequestOutput:
    outputs: list[CompletionOutput]
    finished: bool
