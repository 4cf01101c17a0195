"""Writes runs/coding-policy: a tokenizer of bytes, a template with tools, and a tiny model.

It only lends its words to the engine `scripted`: a harness says some ten thousand words before the
task, which is too much for the calculator's policy to read.
"""

from pathlib import Path

from transformers import AutoModelForCausalLM, Qwen3Config

from treadle_gateway.testing import write_model

FOLDER = Path("runs/coding-policy")


def write(folder: Path) -> None:
    """Writes all of it to a folder."""
    words = write_model(folder)
    shape = Qwen3Config(
        vocab_size=words.get_vocab_size(),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        eos_token_id=words.token_to_id("<|im_end|>"),
        pad_token_id=words.token_to_id("<|endoftext|>"),
        dtype="float32",
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)


if __name__ == "__main__":
    write(FOLDER)
