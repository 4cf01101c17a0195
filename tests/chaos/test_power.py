"""The power fails: what was acknowledged is there when it is back, and nothing half is believed."""

import hashlib
import random
import subprocess
import sys
import threading

import grpc
import pytest
from badinput_harness import (
    PATIENCE_S,
    Service,
    attempt,
    begin,
    experience_settings,
    lease,
    result,
    segment,
    serving,
    until,
)
from e2e_harness import SMALL

from treadle.episode.v1 import episode_pb2
from treadle_payloads.codec import encode_payload
from treadle_payloads.files import FileStore

pytestmark = [pytest.mark.chaos, pytest.mark.processes]

SEED = 5


class Writer(threading.Thread):
    """Completes episodes as fast as they are taken: every other payload is a file in the store."""

    def __init__(self, peer, store, tickets) -> None:
        super().__init__(daemon=True)
        self._peer, self._store, self._tickets = peer, store, tickets
        self.acknowledged = []
        """What was sent and answered, and the sha256 of a payload that is a file."""

    def run(self):
        for number, ticket in enumerate(self._tickets):
            fields = {"replica_id": "r1", "attempt": attempt(ticket), "result": self._of(number)}
            request = self._peer.request("CompleteEpisode", **fields)
            try:
                self._peer.send("CompleteEpisode", request, timeout=5)
            except grpc.RpcError:
                return  # the power is gone
            self.acknowledged.append(request)

    def _of(self, number):
        tokens = 9000 if number % 2 else 1000
        data = encode_payload([segment(tokens + 2 * number)])
        about = {"num_tokens": tokens + 2 * number, "num_trained": tokens // 2 + number}
        if not number % 2:
            return result(data, **about)
        self._store.put(data)
        payload = episode_pb2.Payload(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
        return result(**about, payload=payload)


@pytest.mark.parametrize("seed", [SEED, SEED + 1])
def test_what_was_acknowledged_survives_a_power_cut(make_powered, tmp_path, seed):
    chance = random.Random(seed)  # noqa: S311, a schedule, no secret
    settings = experience_settings(tmp_path, tmp_path)
    with make_powered(tmp_path / "image") as disk:
        settings["run"] |= {"dir": str(disk.path)}
        service = Service("experience", tmp_path, settings, disk.inside)
        with serving(service) as peer:
            begin(peer)
            tickets = lease(peer, max_tickets=128)
            writer = Writer(peer, FileStore(disk.seen("payloads")), tickets)
            writer.start()
            enough = chance.randint(20, 60)
            until(lambda: len(writer.acknowledged) >= enough)
            left = disk.cut(service.process)
            writer.join(PATIENCE_S)

    with make_powered(left) as disk:
        again = Service("experience", tmp_path, settings, disk.inside)
        with serving(again) as peer:
            for request in writer.acknowledged:
                assert peer.send("CompleteEpisode", request).duplicate
                payload = request.result.payload
                if not payload.inline:
                    file = disk.seen("payloads", payload.sha256[:2], payload.sha256)
                    assert hashlib.sha256(file.read_bytes()).hexdigest() == payload.sha256
            assert peer("GetRun").episodes["done"] >= len(writer.acknowledged) >= enough
        disk.fsck()


@pytest.mark.timeout(600)
@pytest.mark.e2e
def test_a_run_whose_power_fails_goes_on_and_ends_well(make_powered, tmp_path):
    recipe = ["recipes/calculator.yaml", f"run.dir={tmp_path / 'disk' / 'run'}", *SMALL]
    command = [sys.executable, "-m", "treadle_cli.main", "train", *recipe, "experience.steps=12"]
    with make_powered(tmp_path / "image") as disk, (tmp_path / "log").open("ab") as log:
        process = subprocess.Popen([*disk.inside, *command], stdout=log, stderr=log)
        rows = disk.seen("run", "metrics", "trainer.jsonl")
        until(lambda: rows.exists() and rows.read_text().count('"step"') >= 5, timeout_s=200)
        left = disk.cut(process)

    with make_powered(left) as disk, (tmp_path / "log").open("ab") as log:
        process = subprocess.Popen([*disk.inside, *command], stdout=log, stderr=log)
        assert process.wait(240) == 0, (tmp_path / "log").read_text()
        disk.fsck("run")
