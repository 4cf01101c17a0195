"""A program that is trained: it finds the policy in its environment, and knows no Treadle."""

import json
import os
import re
from pathlib import Path
from urllib.request import Request, urlopen

task = json.loads(Path(os.environ["TREADLE_TASK"]).read_text())
messages = [{"role": "user", "content": task["expression"]}]
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
headers["Content-Type"] = "application/json"
while True:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urlopen(Request(url, body, headers)) as reply:  # noqa: S310, the gateway's own address
        said = json.load(reply)["choices"][0]["message"]
    call = re.fullmatch(r"<call>(-?\d+)([+-]\d+)", said["content"])
    if not call or len(messages) > 6:
        break
    messages += [said, {"role": "tool", "content": str(int(call[1]) + int(call[2]))}]
right: bool = said["content"] == f"<answer>{task['answer']}"
Path(os.environ["TREADLE_REWARD"]).write_text(str(float(right)))
