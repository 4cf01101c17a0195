"""ExperienceService: wire in, one decision of the core, wire out."""

import sys

import grpc.aio

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1 import experience_service_pb2_grpc as rpc
from treadle_core.ids import checked_id
from treadle_experience import requests, wire
from treadle_experience.core import checkpoints, faults, results, steps, tickets, versions
from treadle_experience.core.preview import preview
from treadle_experience.core.rules import Rules
from treadle_experience.core.summary import summarise
from treadle_experience.custody import Custody
from treadle_experience.keeper import Keeper
from treadle_runtime.fields import at_least, check_run, duration, hexadecimal, wait_s

MAX_WAIT_S = 30.0
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExperienceService"].full_name


class ExperienceServicer(rpc.ExperienceServiceServicer):
    """Serves one run. Errors are the typed ones of `core.errors`, as the proto lists them."""

    def __init__(self, keeper: Keeper, rules: Rules, custody: Custody) -> None:
        self._keeper = keeper
        self._rules = rules
        self._custody = custody

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        rpc.add_ExperienceServiceServicer_to_server(self, server)

    async def LeaseTickets(
        self, request: pb.LeaseTicketsRequest, context: object
    ) -> pb.LeaseTicketsResponse:
        check_run(self._rules.run_id, request.run_id)
        replica_id = checked_id("replica_id", request.replica_id)
        max_tickets = at_least("max_tickets", request.max_tickets, 1)
        slots = at_least("slots", request.slots, 1)
        leased, complete = await self._keeper.poll(
            lambda run: (
                tickets.lease(
                    run,
                    replica_id=replica_id,
                    served_version=request.served_version,
                    max_tickets=max_tickets,
                    slots=slots,
                ),
                steps.is_complete(run),
            ),
            lambda answer: bool(answer[0]) or answer[1],
            wait_s=min(wait_s(request.wait), MAX_WAIT_S),
        )
        return pb.LeaseTicketsResponse(
            tickets=map(wire.ticket, leased),
            lease=duration(self._rules.lease_s),
            complete=complete,
        )

    async def RenewLeases(
        self, request: pb.RenewLeasesRequest, context: object
    ) -> pb.RenewLeasesResponse:
        check_run(self._rules.run_id, request.run_id)
        replica_id = checked_id("replica_id", request.replica_id)
        served_version = at_least("served_version", request.served_version, 0)
        attempts = requests.attempts(request.attempts)
        held, revoked = await self._keeper.ask(
            tickets.renew, replica_id=replica_id, served_version=served_version, attempts=attempts
        )
        self._keeper.renew(held)
        return pb.RenewLeasesResponse(revoked=wire.attempts(revoked))

    async def CompleteEpisode(
        self, request: pb.CompleteEpisodeRequest, context: object
    ) -> pb.CompleteEpisodeResponse:
        check_run(self._rules.run_id, request.run_id)
        replica_id = checked_id("replica_id", request.replica_id)
        attempt = requests.attempt(request.attempt)
        result = requests.result(request.result)
        taken = self._custody.taken(request.result.payload, result, attempt.episode_id)
        async with taken as (result, inline):
            duplicate = await self._keeper.ask(
                results.complete,
                replica_id=replica_id,
                attempt=attempt,
                result=result,
                inline=inline,
            )
        return pb.CompleteEpisodeResponse(duplicate=duplicate)

    async def FailEpisode(
        self, request: pb.FailEpisodeRequest, context: object
    ) -> pb.FailEpisodeResponse:
        check_run(self._rules.run_id, request.run_id)
        replica_id = checked_id("replica_id", request.replica_id)
        attempt = requests.attempt(request.attempt)
        failure = requests.failure(request)
        retried = await self._keeper.ask(
            tickets.fail, replica_id=replica_id, attempt=attempt, failure=failure
        )
        return pb.FailEpisodeResponse(retried=retried)

    async def ReturnTickets(
        self, request: pb.ReturnTicketsRequest, context: object
    ) -> pb.ReturnTicketsResponse:
        check_run(self._rules.run_id, request.run_id)
        replica_id = checked_id("replica_id", request.replica_id)
        attempts = requests.attempts(request.attempts)
        await self._keeper.ask(tickets.give_back, replica_id=replica_id, attempts=attempts)
        return pb.ReturnTicketsResponse()

    async def AcquireRun(
        self, request: pb.AcquireRunRequest, context: object
    ) -> pb.AcquireRunResponse:
        check_run(self._rules.run_id, request.run_id)
        holder = checked_id("holder", request.holder)
        digest = hexadecimal("checkpoint_digest", request.checkpoint_digest, 64, optional=True)
        epoch, step = await self._keeper.ask(
            checkpoints.acquire, holder=holder, checkpoint_digest=digest
        )
        return pb.AcquireRunResponse(trainer_epoch=epoch, step=step)

    async def ClaimStep(
        self, request: pb.ClaimStepRequest, context: object
    ) -> pb.ClaimStepResponse:
        check_run(self._rules.run_id, request.run_id)
        step = at_least("step", request.step, 1)
        claim = await self._keeper.poll(
            lambda run: steps.claim(run, trainer_epoch=request.trainer_epoch, step=step),
            lambda claim: bool(claim.tasks) or claim.complete,
            wait_s=min(wait_s(request.wait), MAX_WAIT_S),
        )
        return wire.claim(claim)

    async def PreviewSteps(
        self, request: pb.PreviewStepsRequest, context: object
    ) -> pb.PreviewStepsResponse:
        check_run(self._rules.run_id, request.run_id)
        max_steps = at_least("max_steps", request.max_steps, 0)
        coming = await self._keeper.ask(preview, max_steps=max_steps)
        return pb.PreviewStepsResponse(steps=map(wire.previewed, coming))

    async def HandBackStep(
        self, request: pb.HandBackStepRequest, context: object
    ) -> pb.HandBackStepResponse:
        check_run(self._rules.run_id, request.run_id)
        step = at_least("step", request.step, 1)
        found = requests.faults(request.faults)
        await self._keeper.ask(
            faults.hand_back, trainer_epoch=request.trainer_epoch, step=step, faults=found
        )
        return pb.HandBackStepResponse()

    async def ReportStep(
        self, request: pb.ReportStepRequest, context: object
    ) -> pb.ReportStepResponse:
        check_run(self._rules.run_id, request.run_id)
        step = at_least("step", request.step, 1)
        metrics = requests.numbers("metrics", request.metrics, sys.float_info.max)
        trace_id = hexadecimal("trace_id", request.trace_id, 32, optional=True)
        checkpoint_now = await self._keeper.ask(
            steps.report,
            trainer_epoch=request.trainer_epoch,
            step=step,
            metrics=metrics,
            trace_id=trace_id,
        )
        return pb.ReportStepResponse(checkpoint_now=checkpoint_now)

    async def CommitCheckpoint(
        self, request: pb.CommitCheckpointRequest, context: object
    ) -> pb.CommitCheckpointResponse:
        check_run(self._rules.run_id, request.run_id)
        digest = hexadecimal("digest", request.digest, 64)
        parent = hexadecimal("parent_digest", request.parent_digest, 64, optional=True)
        step = at_least("step", request.step, 0)
        path = requests.relative_path("path", request.path)
        retained = await self._keeper.ask(
            checkpoints.commit,
            trainer_epoch=request.trainer_epoch,
            digest=digest,
            parent_digest=parent,
            step=step,
            path=path,
        )
        return pb.CommitCheckpointResponse(retained=map(wire.checkpoint, retained))

    async def AnnounceVersion(
        self, request: pb.AnnounceVersionRequest, context: object
    ) -> pb.AnnounceVersionResponse:
        check_run(self._rules.run_id, request.run_id)
        step = at_least("step", request.step, 0)
        request_id = checked_id("request_id", request.request_id)
        trace_id = hexadecimal("trace_id", request.trace_id, 32, optional=True)
        number = await self._keeper.ask(
            versions.announce,
            trainer_epoch=request.trainer_epoch,
            step=step,
            request_id=request_id,
            trace_id=trace_id,
        )
        return pb.AnnounceVersionResponse(version=number)

    async def CommitVersion(
        self, request: pb.CommitVersionRequest, context: object
    ) -> pb.CommitVersionResponse:
        check_run(self._rules.run_id, request.run_id)
        number = at_least("version", request.version, 1)
        digest = hexadecimal("weights_digest", request.weights_digest, 16)
        await self._keeper.ask(
            versions.commit,
            trainer_epoch=request.trainer_epoch,
            number=number,
            weights_digest=digest,
        )
        return pb.CommitVersionResponse()

    async def AbortVersion(
        self, request: pb.AbortVersionRequest, context: object
    ) -> pb.AbortVersionResponse:
        check_run(self._rules.run_id, request.run_id)
        number = at_least("version", request.version, 1)
        message = request.message[: tickets.MESSAGE_LIMIT]
        await self._keeper.ask(versions.abort, number=number, message=message)
        return pb.AbortVersionResponse()

    async def GetRun(self, request: pb.GetRunRequest, context: object) -> pb.GetRunResponse:
        check_run(self._rules.run_id, request.run_id)
        after = at_least("after", request.after, 0)
        summary = await self._keeper.poll(
            summarise,
            lambda summary: summary.position > after,
            wait_s=min(wait_s(request.wait), MAX_WAIT_S),
        )
        return wire.summary(summary, self._keeper.durability)

    async def CheckPayloads(
        self, request: pb.CheckPayloadsRequest, context: object
    ) -> pb.CheckPayloadsResponse:
        check_run(self._rules.run_id, request.run_id)
        unneeded = await self._custody.unneeded(requests.keys("sha256s", request.sha256s))
        return pb.CheckPayloadsResponse(unneeded=unneeded, writer_epoch=self._keeper.writer_epoch)
