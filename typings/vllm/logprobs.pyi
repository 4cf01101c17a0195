class FlatLogprobs:
    token_ids: list[int]
    logprobs: list[float]
