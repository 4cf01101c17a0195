"""WeightTransport `gloo`: versions as broadcasts over communicators, between hosts.

The bytes lie with the sender until a newer version is committed: the trainer may go on while late
engines come for them. Importing this imports no torch; making a sender or a receiver does.
"""

from pathlib import Path
from typing import Literal

from treadle_core.errors import InvalidFieldError
from treadle_weights.channel import Terms
from treadle_weights.groups import Communicators
from treadle_weights.receiving import Receiver
from treadle_weights.sending import Sender
from treadle_weights.transport import Arena, Stored


class Gloo:
    """WeightTransport plugin `gloo`; `backend: nccl` for engines with a GPU each."""

    def __init__(
        self,
        port: int,
        host: str = "127.0.0.1",
        backend: Literal["gloo", "nccl"] = "gloo",
        encoding: Literal["auto", "dense", "delta"] = "auto",
        bucket_bytes: int = 16 * 2**20,
        most_bytes_per_s: float | None = None,
        *,
        packed: bool = True,
        gather_s: float = 0.25,
        join_s: float = 2.0,
        form_s: float = 10.0,
        stall_s: float = 10.0,
        give_up_s: float = 40.0,
        insecure_dev: bool = False,
        run_dir: Path | None = None,
    ) -> None:
        """Raises InvalidFieldError. `run_dir` makes no difference."""
        self._terms = Terms(
            host=host,
            port=port,
            backend=backend,
            encoding=encoding,
            bucket_bytes=bucket_bytes,
            is_packed=packed,
            gather_s=gather_s,
            join_s=join_s,
            form_s=form_s,
            stall_s=stall_s,
            give_up_s=give_up_s,
            most_bytes_per_s=most_bytes_per_s,
            is_insecure=insecure_dev,
        )

    def arena(self, run_id: str, version: int, size: int) -> Arena:
        return self._terms.arena(run_id, version, size)

    def alias(self, run_id: str, version: int, base: Arena) -> Arena:
        """The base's: it lies with the sender, which says itself whether it is gone."""
        transfer, _ = self._terms.transfer(base)
        if transfer.partition("/")[0] != run_id:
            raise InvalidFieldError("arena.path", limit=f"of run {run_id}", value=base.path)
        return base

    def find(self, run_id: str, version: int) -> Stored | None:
        """None: a version does not outlive its sender."""
        return None

    def sender(self, run_id: str) -> Sender:
        """Raises PortTakenError where somebody listens at the port."""
        return Sender(run_id, self._terms, self._communicators())

    def receiver(self) -> Receiver:
        return Receiver(self._terms, self._communicators())

    def _communicators(self) -> Communicators:
        # Refit names arenas by this transport, and is installed without torch.
        from treadle_weights.torch_groups import communicators  # noqa: PLC0415

        terms = self._terms
        return communicators(terms.backend, form_s=terms.form_s, stall_s=terms.stall_s)
