"""How a process knows that all who need it are gone: a pipe that they hold open."""

SUPERVISOR_FD = "TREADLE_SUPERVISOR_FD"
"""Environment variable: the reading end; its end means that it is this process's turn to drain."""
