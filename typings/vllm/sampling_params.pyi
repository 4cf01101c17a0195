from enum import Enum
from typing import Any

class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2

class StructuredOutputsParams:
    def __init__(self, *, grammar: str | None = None) -> None: ...

class SamplingParams:
    def __init__(self, **fields: Any) -> None: ...
