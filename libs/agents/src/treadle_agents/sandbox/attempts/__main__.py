"""Makes one attempt; see the package."""

import json
import sys

from treadle_agents.sandbox.attempts import ATTEMPTS, EVIDENCE

EVIDENCE.update(json.load(sys.stdin))
how = ATTEMPTS[sys.argv[1]]()
sys.stdout.write(f"escaped: {how}\n" if how else "held\n")
sys.stdout.flush()
