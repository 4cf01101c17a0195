"""Commands as whole process trees: started, drained, timed, and gone when they are over."""

from treadle_agents.processes.ended import Cut, Ended
from treadle_agents.processes.tree import TreeLostError, run_tree

__all__ = ["Cut", "Ended", "TreeLostError", "run_tree"]
