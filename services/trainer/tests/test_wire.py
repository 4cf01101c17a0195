"""The contract, over a real channel: what is sent, and what an answer becomes."""

from functools import partial

import numpy as np
import pytest

from treadle.episode.v1 import episode_pb2
from treadle.experience.v1 import experience_service_pb2 as experience_pb
from treadle.experience.v1 import experience_service_pb2_grpc as experience_rpc
from treadle.refit.v1 import refit_service_pb2 as refit_pb
from treadle.refit.v1 import refit_service_pb2_grpc as refit_rpc
from treadle.trainer.v1 import trainer_service_pb2 as pb
from treadle.trainer.v1 import trainer_service_pb2_grpc as rpc
from treadle_core.episodes import Termination
from treadle_core.errors import InvalidFieldError
from treadle_core.faults import Fault, FaultReason
from treadle_payloads.store import PayloadReference
from treadle_runtime.doorbells.poll import PollDoorbell
from treadle_runtime.errors import RemoteError
from treadle_runtime.testing import running
from treadle_trainer import wire
from treadle_trainer.adapters.experience_client import ExperienceClient
from treadle_trainer.adapters.in_memory import FencedError
from treadle_trainer.adapters.refit_client import RefitClient
from treadle_trainer.core.claims import ClaimedEpisode
from treadle_trainer.core.status import Phase, TrainerStatus
from treadle_trainer.ports import TRAINER_FENCED, Checkpoint, NewVersion, OpenedVersion, SentVersion
from treadle_trainer.servicer import TrainerServicer
from treadle_weights.layouts import whole
from treadle_weights.transport import Arena

SHA = "ab" * 32
CHECKPOINT = Checkpoint("cd" * 32, "", 4, "checkpoints/step-000004")


def recorder(base, **answers):
    """A servicer that answers what it is told to, and the list in which it keeps the requests."""
    requests = []

    def method(answer):
        async def keep(self, request, context):
            requests.append(request)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return keep

    methods = {name: method(answer) for name, answer in answers.items()}
    return type("Recorder", (base,), methods)(), requests


def experience(**answers):
    servicer, requests = recorder(experience_rpc.ExperienceServiceServicer, **answers)
    add = partial(experience_rpc.add_ExperienceServiceServicer_to_server, servicer)
    return running(add, "treadle.experience"), requests


def refit(**answers):
    servicer, requests = recorder(refit_rpc.RefitServiceServicer, **answers)
    return running(
        partial(refit_rpc.add_RefitServiceServicer_to_server, servicer), "treadle.refit"
    ), requests


def claimed(**changes):
    result = episode_pb2.EpisodeResult(
        termination=episode_pb2.TERMINATION_TRUNCATED,
        metrics={"turns": 3},
        num_tokens=7,
        num_trained=2,
        versions=[1, 3],
        traceparent="00-1-2-01",
        payload=episode_pb2.Payload(sha256=SHA, size=9),
    )
    fields = {"episode_id": "e", "attempt": 2, "index": 1, "oldest_step": 5, "result": result}
    return experience_pb.ClaimedEpisode(**(fields | changes))


async def test_a_status_is_told_as_it_is():
    status = TrainerStatus(3, 17, Phase.PUBLISHING, waited_s=1.5, up_s=9.0)
    servicer = TrainerServicer(lambda: status)
    async with running(
        lambda server: rpc.add_TrainerServiceServicer_to_server(servicer, server),
        "treadle.trainer",
    ) as channel:
        answer = await rpc.TrainerServiceStub(channel).GetTrainer(pb.GetTrainerRequest(), timeout=5)
    assert answer == pb.GetTrainerResponse(
        trainer_epoch=3, step=17, phase=pb.TRAINER_PHASE_PUBLISHING, waited_s=1.5, up_s=9.0
    )


def test_every_phase_has_a_number_on_the_wire():
    numbers = {wire.status_to_wire(TrainerStatus(0, 0, phase, 0.0, 0.0)).phase for phase in Phase}
    assert len(numbers) == len(Phase)
    assert pb.TRAINER_PHASE_UNSPECIFIED not in numbers


def test_every_reason_of_a_fault_has_its_own_number():
    faults = [Fault("e", 1, reason, "") for reason in FaultReason]
    numbers = {wire.fault_to_wire(fault).reason for fault in faults}
    assert len(numbers) == len(FaultReason)
    assert experience_pb.FAULT_REASON_UNSPECIFIED not in numbers


@pytest.mark.parametrize("reward", [None, 0.0, 1.0])
@pytest.mark.parametrize("inline", [None, b"", b"bytes"])
def test_what_is_absent_is_not_zero(reward, inline):
    message = claimed()
    if reward is not None:
        message.result.reward = reward
    if inline is not None:
        message.result.payload.inline = inline
    task = experience_pb.ClaimedTask(task_id="t", episodes=[message])
    claim = wire.claim_from_wire(experience_pb.ClaimStepResponse(tasks=[task], last=True))
    assert claim.last
    assert not claim.complete
    assert claim.episodes == (
        ClaimedEpisode(
            episode_id="e",
            attempt=2,
            reward=reward,
            termination=Termination.TRUNCATED,
            num_tokens=7,
            num_trained=2,
            versions=(1, 3),
            oldest_step=5,
            payload=PayloadReference(SHA, 9),
            inline=inline,
            metrics={"turns": 3.0},
            traceparent="00-1-2-01",
        ),
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        pytest.param({"result": episode_pb2.EpisodeResult()}, "e.termination", id="termination"),
        pytest.param({"oldest_step": -1}, "e.oldest_step", id="oldest-step"),
    ],
)
def test_a_claim_that_makes_no_sense_is_refused(changes, field):
    task = experience_pb.ClaimedTask(task_id="t", episodes=[claimed(**changes)])
    with pytest.raises(InvalidFieldError) as raised:
        wire.claim_from_wire(experience_pb.ClaimStepResponse(tasks=[task]))
    assert raised.value.field == field


async def test_the_ledger_is_asked_with_run_and_epoch():
    as_sent = experience_pb.Checkpoint(
        digest=CHECKPOINT.digest, step=CHECKPOINT.step, path=CHECKPOINT.path
    )
    server, requests = experience(
        GetRun=experience_pb.GetRunResponse(position=8, checkpoints=[as_sent], complete=True),
        AcquireRun=experience_pb.AcquireRunResponse(trainer_epoch=2, step=4),
        ClaimStep=experience_pb.ClaimStepResponse(complete=True),
        HandBackStep=experience_pb.HandBackStepResponse(),
        ReportStep=experience_pb.ReportStepResponse(checkpoint_now=True),
        CommitCheckpoint=experience_pb.CommitCheckpointResponse(retained=[as_sent]),
    )
    async with server as channel:
        client = ExperienceClient(channel, "run", PollDoorbell(run_id="run"))
        run = await client.get_run(after=3, wait_s=1.5)
        acquired = await client.acquire(holder="me", checkpoint_digest="")
        claim = await client.claim(trainer_epoch=2, step=5, wait_s=20)
        faults = [
            Fault("e", 3, FaultReason.PAYLOAD_LOST, "gone"),
            Fault("f", 1, FaultReason.QUARANTINED, "odd"),
        ]
        await client.hand_back(trainer_epoch=2, step=5, faults=faults)
        wanted = await client.report(trainer_epoch=2, step=5, metrics={"loss": 0.5}, trace_id="t")
        retained = await client.commit(trainer_epoch=2, checkpoint=CHECKPOINT)
    assert (run.position, run.checkpoints, run.complete) == (8, (CHECKPOINT,), True)
    assert acquired == 2
    assert claim.complete
    assert retained == (CHECKPOINT,)
    assert wanted is True
    asked, acquire, claiming, hand_back, report, commit = requests
    assert {request.run_id for request in requests} == {"run"}
    assert (asked.after, asked.wait.ToMilliseconds()) == (3, 1500)
    assert acquire.holder == "me"
    assert (claiming.trainer_epoch, claiming.step, claiming.wait.seconds) == (2, 5, 20)
    assert (hand_back.trainer_epoch, hand_back.step) == (2, 5)
    assert [(f.episode_id, f.attempt, f.reason, f.message) for f in hand_back.faults] == [
        ("e", 3, experience_pb.FAULT_REASON_PAYLOAD_LOST, "gone"),
        ("f", 1, experience_pb.FAULT_REASON_QUARANTINED, "odd"),
    ]
    assert (report.step, dict(report.metrics), report.trace_id) == (5, {"loss": 0.5}, "t")
    assert (commit.digest, commit.step, commit.path) == (
        CHECKPOINT.digest,
        CHECKPOINT.step,
        CHECKPOINT.path,
    )


async def test_refit_is_given_layout_and_digests():
    layout = whole({"w": ("float32", (2, 3))})
    server, requests = refit(
        OpenVersion=refit_pb.OpenVersionResponse(
            version=7,
            arena=refit_pb.Arena(path="/dev/shm/a", size=24),  # noqa: S108
            aliased=True,
        ),
        SendVersion=refit_pb.SendVersionResponse(members=2, left_behind=1),
        AwaitDemand=refit_pb.AwaitDemandResponse(wanted=True),
    )
    async with server as channel:
        client = RefitClient(channel, "run")
        opened = await client.open_version(NewVersion(2, 5, "r", layout, "t", 6, "ab" * 8))
        sent = await client.send_version(trainer_epoch=2, version=7, digests={"w": 255})
        wanted = await client.await_demand(published_version=6, wait_s=2)
    assert opened == OpenedVersion(7, Arena("/dev/shm/a", 24), aliased=True)  # noqa: S108
    assert sent == SentVersion(2, 1)
    assert wanted
    open_request, send_request, demand_request = requests
    assert (open_request.run_id, open_request.step, open_request.request_id) == ("run", 5, "r")
    assert (open_request.alias_of, open_request.weights_digest) == (6, "ab" * 8)
    np.testing.assert_array_equal(open_request.layout.rectangles[0].stop, [2, 3])
    assert dict(send_request.digests) == {"w": "00000000000000ff"}
    assert demand_request.published_version == 6


async def test_an_error_of_a_peer_keeps_its_reason():
    server, _ = experience(ClaimStep=FencedError("fenced by epoch 3", value=3))
    async with server as channel:
        with pytest.raises(RemoteError) as raised:
            await ExperienceClient(channel, "run", PollDoorbell(run_id="run")).claim(
                trainer_epoch=2, step=1, wait_s=0
            )
    assert raised.value.reason == TRAINER_FENCED
    assert raised.value.value == "3"


async def test_steps_to_come_are_told_without_what_the_ledger_holds():
    held = claimed(episode_id="held")
    held.result.payload.inline = b""
    task = experience_pb.ClaimedTask(task_id="t", episodes=[claimed(), held])
    steps = [experience_pb.PreviewedStep(step=3, tasks=[task], ready=True)]
    server, requests = experience(PreviewSteps=experience_pb.PreviewStepsResponse(steps=steps))
    async with server as channel:
        client = ExperienceClient(channel, "run", PollDoorbell(run_id="run"))
        (coming,) = await client.preview(max_steps=2)
    assert (requests[0].run_id, requests[0].max_steps) == ("run", 2)
    assert coming.ready
    assert [each.inline for each in coming.claim.episodes] == [None, b""]
