"""How policies call tools: one file a format, and one line here."""

from collections.abc import Sequence

from treadle_gateway.markup.readers.block import CallFormat
from treadle_gateway.markup.readers.deepseek import DeepSeek
from treadle_gateway.markup.readers.hermes import Hermes
from treadle_gateway.markup.readers.llama import Llama
from treadle_gateway.markup.readers.mistral import Mistral
from treadle_gateway.markup.readers.qwen_coder import QwenCoder

FORMATS: Sequence[CallFormat] = (Hermes(), QwenCoder(), Mistral(), DeepSeek(), Llama())
"""In the order in which a template is asked; the first that reads its calls is taken."""
