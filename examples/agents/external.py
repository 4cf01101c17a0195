"""A client from anywhere: takes episodes of a run, plays them, and says what they were worth.

`external.py 100` plays a hundred. TREADLE_GATEWAY is the address of the run's gateway, and
TREADLE_RUN_TOKEN lets its holder take episodes. It ends where none is offered for a minute.
"""

import json
import os
import sys
from typing import Any
from urllib.request import Request, urlopen


def post(url: str, token: str, body: dict[str, Any]) -> Any:
    """What the gateway answers."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers)) as answer:  # noqa: S310, as told
        return json.load(answer)


for _ in range(int(sys.argv[1])):
    sessions = f"{os.environ['TREADLE_GATEWAY']}/sessions"
    episode = post(sessions, os.environ["TREADLE_RUN_TOKEN"], {"wait_s": 60})
    task, token = episode["task"], episode["token"]
    messages = [{"role": "user", "content": task["expression"]}]
    body = {"model": "policy", "messages": messages}
    reply = post(f"{episode['urls']['openai']}/chat/completions", token, body)
    right: bool = reply["choices"][0]["message"]["content"] == f"<answer>{task['answer']}"
    post(episode["urls"]["end"], token, {"reward": float(right)})
