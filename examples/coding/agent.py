"""A coding agent on the openai library: it asks, uses a calculator when told to, writes the file.

It finds the policy in the variables that the library reads, and knows nothing of training. Its
prompts are in the few symbols of the calculator's policy.
"""

# pyright: basic, reportMissingImports=false
# The library lies in the folder of `make clients` alone.

import json
import os
import re
from pathlib import Path
from typing import Any

from openai import OpenAI

CALL = re.compile(r"<call>(-?\d{1,6})([+-]\d{1,6})")
ANSWER = re.compile(r"<answer>(-?\d{1,6})")
MAX_CALLS = 4

client = OpenAI()
task = json.loads(Path(os.environ["TREADLE_TASK"]).read_text())
messages: list[Any] = [{"role": "user", "content": task["expression"]}]
for _ in range(MAX_CALLS):
    reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    said = reply.choices[0].message.content or ""
    if answer := ANSWER.fullmatch(said):
        Path("solution.py").write_text(f"def value():\n    return {answer[1]}\n")
    call = CALL.fullmatch(said)
    if not call:
        break
    result = str(int(call[1]) + int(call[2]))
    messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": result}]
