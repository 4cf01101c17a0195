"""The one tool that these agents have: a shell in the folder that they are started in."""

import subprocess

TASK = "Please do the small thing."
DESCRIPTION = "Runs a command in the shell and returns what it prints."
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}


def run_command(command: str) -> str:
    """Runs a command in the shell and returns what it prints."""
    done = subprocess.run(command, shell=True, check=False, capture_output=True, text=True)
    return done.stdout
