from typing import TypedDict

class TokensInput(TypedDict):
    prompt_token_ids: list[int]

def tokens_input(prompt_token_ids: list[int], *, cache_salt: str | None = None) -> TokensInput: ...
