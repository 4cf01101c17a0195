"""Folders of models in the manner of the known families, with a small tokenizer in each."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from treadle_gateway.markup.template import Markup

TEMPLATES = Path(__file__).with_name("templates")

_CHATML = (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>")
_CALLS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_MISTRAL = ["[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"]
_MISTRAL += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]"]

FAMILIES: dict[str, tuple[list[str], list[str], str]] = {
    # Special tokens, other tokens of their own, and the one that ends a turn.
    "chatml": (_CHATML[0], [], _CHATML[1]),
    "qwen2": (_CHATML[0], _CALLS[:2], _CHATML[1]),
    "qwen3": (_CHATML[0], [*_CALLS, "<think>", "</think>"], _CHATML[1]),
    "qwen_coder": (_CHATML[0], _CALLS, _CHATML[1]),
    "llama3": (
        [
            *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eot_id|>", "<|python_tag|>"),
        ],
        [],
        "<|eot_id|>",
    ),
    "mistral": (["<s>", "</s>", *_MISTRAL], [], "</s>"),
    "mistral_named": (["<s>", "</s>", *_MISTRAL], [], "</s>"),
    "deepseek_r1": (
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
        ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁sep｜>"]
        + [f"<｜tool▁{of}▁{at}｜>" for of in ("call", "calls") for at in ("begin", "end")]
        + [f"<｜tool▁{of}▁{at}｜>" for of in ("output", "outputs") for at in ("begin", "end")],
        "<｜end▁of▁sentence｜>",
    ),
    "gemma": (["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], [], "<end_of_turn>"),
    "vision": (
        [*_CHATML[0], "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"],
        [],
        _CHATML[1],
    ),
    "unended": (["<|user|>", "<|assistant|>", "<|system|>", "</s>"], [], "</s>"),
}
BEGINS = {
    "llama3": "<|begin_of_text|>",
    "deepseek_r1": "<｜begin▁of▁sentence｜>",
    "gemma": "<bos>",
}

Folder = Callable[..., Path]


@cache
def _vocabulary() -> str:
    """A byte-level BPE tokenizer of few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words = "the weather in a town is told by the tool that is called with the name of the town"
    tokenizer.train_from_iterator(
        [words, '{"name": "forecast", "arguments": {"days": 3}}'], trainer
    )
    return tokenizer.to_str()


def write_folder(path: Path, family: str, *, template: str | None = None) -> Path:
    """A Hugging Face folder of a family, but for its parameters."""
    special, plain, end = FAMILIES[family]
    tokenizer = Tokenizer.from_str(_vocabulary())
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in special])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in plain])
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"eos_token": end, "bos_token": BEGINS.get(family, "<s>")}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    if template is None:
        template = (TEMPLATES / f"{family}.jinja").read_text()
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    def write(family: str, *, template: str | None = None) -> Path:
        return write_folder(tmp_path, family, template=template)

    return write


class Families:
    """Each family's markup, read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: dict[str, Markup] = {}

    def folder(self, name: str) -> Path:
        return self._path / name

    def __call__(self, name: str) -> Markup:
        if name not in self._read:
            self.folder(name).mkdir(exist_ok=True)
            self._read[name] = Markup(write_folder(self.folder(name), name))
        return self._read[name]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))
