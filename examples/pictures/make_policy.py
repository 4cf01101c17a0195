"""Writes policy/: a tokenizer of bytes with image tokens, a template, and a very small model.

The model sees no images and is not trained: the recipe's policy is a script.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
IMAGE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
ALPHABET = 256
"""Tokens of bytes."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and those of the markup."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL + IMAGE])
    roles = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, **roles)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def shape(vocabulary: int) -> Qwen3Config:
    """One layer of 16 numbers."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        dtype="float32",
    )


def main() -> None:
    folder = Path(__file__).parent / "policy"
    words = tokenizer()
    words.save_pretrained(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape(ALPHABET + len(SPECIAL + IMAGE))).save_pretrained(folder)


if __name__ == "__main__":
    main()
