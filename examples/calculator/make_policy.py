"""Writes tokenizer/ and config.json, from which `treadle sft` makes the policy."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

SPECIAL = ("<pad>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
"""Tokens that only the chat template writes; `<|end|>` ends a turn."""
MARKS = ("<call>", "<answer>", "error")
"""What the policy and the calculator say beside numbers."""
CHARACTERS = tuple("0123456789+- ")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a mark, digit or sign: numbers are spelled, so the policy must copy and add."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + MARKS + CHARACTERS)}
    core = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("<call>|<answer>|error|."), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(SPECIAL))
    roles = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<|end|>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, **roles)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def shape() -> Qwen3Config:
    """Qwen3 in small: 399,872 parameters in two layers, just enough to copy numbers."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(SPECIAL + MARKS + CHARACTERS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        # Texts are short: slower rotations would all look alike, and copying comes later.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|end|>"),
        pad_token_id=SPECIAL.index("<pad>"),
        dtype="float32",
    )


def main() -> None:
    here = Path(__file__).parent
    tokenizer().save_pretrained(here / "tokenizer")
    shape().save_pretrained(here)


if __name__ == "__main__":
    main()
