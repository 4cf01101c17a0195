"""Opens the payload store that a run's recipe picks."""

from treadle_payloads.store import PayloadStore
from treadle_runtime.config import RunConfig
from treadle_runtime.plugins import build


def open_store(run: RunConfig) -> PayloadStore:
    """The plugin of `run.payloads`; raises PluginError."""
    return build("treadle.payload_stores", run.payloads, run_dir=run.dir, run_id=run.id)
