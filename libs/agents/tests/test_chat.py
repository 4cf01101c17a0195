import json
from pathlib import Path

import pytest

from treadle_core.errors import InvalidFieldError

pytest.importorskip("jinja2")
from treadle_agents.chat import Chat

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
USER = {"role": "user", "content": "6 * 7"}
OPENED = "<|im_start|>user\n6 * 7<|im_end|>\n<|im_start|>assistant\n"


def folder(path: Path, template: str | None = CHATML, **config: object) -> Path:
    """A Hugging Face folder, but for its policy."""
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}} | config
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def test_a_prompt_ends_where_the_policy_speaks(tmp_path: Path) -> None:
    assert Chat(folder(tmp_path)).prompt([USER]) == OPENED


def test_prompt_turn_and_reply_are_the_whole_conversation(tmp_path: Path) -> None:
    chat = Chat(folder(tmp_path))
    said, answer = {"role": "assistant", "content": "43"}, {"role": "user", "content": "no"}

    text = chat.prompt([USER]) + "43<|im_end|>" + chat.reply(answer)

    assert text == chat.prompt([USER, said, answer])


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(CHATML, id="text"),
        pytest.param(
            [{"name": "tool_use", "template": ""}, {"name": "default", "template": CHATML}],
            id="several",
        ),
    ],
)
def test_a_template_may_stand_in_the_tokenizers_configuration(tmp_path: Path, stored) -> None:
    assert Chat(folder(tmp_path, None, chat_template=stored)).prompt([USER]) == OPENED


def test_what_was_said_has_no_stop_token_of_tokenizer_or_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    added = [{"id": 7, "content": "<|im_end|>"}, {"id": 8, "content": "<|endoftext|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))

    chat = Chat(folder(tmp_path))

    assert [chat.content(f" 42\n{end}") for end in ("", "<|im_end|>", "<|endoftext|>")] == [
        "42"
    ] * 3


def test_a_template_reads_the_names_of_special_tokens(tmp_path: Path) -> None:
    chat = Chat(folder(tmp_path, "{{ bos_token }}{{ messages[0].content | tojson }}"))
    assert chat.prompt([{"role": "user", "content": "<ä>"}]) == '<s>"<ä>"'


@pytest.mark.parametrize(
    ("template", "told"),
    [
        pytest.param(None, "none in", id="absent"),
        pytest.param("{% for %}", "in Jinja", id="broken"),
    ],
)
def test_a_folder_that_cannot_chat_is_told(tmp_path: Path, template, told: str) -> None:
    with pytest.raises(InvalidFieldError, match=told):
        Chat(folder(tmp_path, template))


def test_what_a_template_marks_as_said_by_the_policy_is_rendered_as_it_stands(
    tmp_path: Path,
) -> None:
    marked = "{% generation %}{{ messages[0].content }}{% endgeneration %}!"
    assert Chat(folder(tmp_path, marked)).prompt([USER]) == "6 * 7!"


def test_a_template_is_told_that_there_are_no_tools(tmp_path: Path) -> None:
    asks = "{{ 'no ' if tools is none and documents is none }}tools"
    assert Chat(folder(tmp_path, asks)).prompt([USER]) == "no tools"
