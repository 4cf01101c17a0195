"""How an episode ended, in the numbers of `treadle.episode.v1`."""

from treadle.episode.v1 import episode_pb2 as pb
from treadle_core.episodes import FailureClass, Termination

TERMINATIONS = {
    Termination.FINISHED: pb.TERMINATION_FINISHED,
    Termination.TRUNCATED: pb.TERMINATION_TRUNCATED,
    Termination.FAILED: pb.TERMINATION_FAILED,
}
FAILURE_CLASSES = {
    FailureClass.POLICY: pb.FAILURE_CLASS_POLICY,
    FailureClass.ENVIRONMENT: pb.FAILURE_CLASS_ENVIRONMENT,
    FailureClass.INFRASTRUCTURE: pb.FAILURE_CLASS_INFRASTRUCTURE,
}
