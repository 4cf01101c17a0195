"""The command that runs the checks, on engines that break promises."""

import json

import pytest

from treadle_agents.record import Generated
from treadle_rollout import conformance
from treadle_rollout.adapters.scripted import ScriptedEngine
from treadle_rollout.conformance.__main__ import examine, main, measures
from treadle_rollout.conformance.tables import Tables
from treadle_rollout.ports import GenerationRequest, Heard


def test_the_command_says_what_it_ran_and_what_did_not_apply(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["scripted"]) == 0

    rows = {row["measure"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["conformance_failures"] == {
        "measure": "conformance_failures",
        "value": 0,
        "unit": "checks",
        "goal": "== 0",
        "holds": True,
        "names": {},
    }
    assert "logprobs_are_those_of_a_fresh_forward" in rows["conformance_not_applicable"]["names"]
    ran, left = (rows[f"conformance_{name}"]["value"] for name in ("cases", "not_applicable"))
    assert ran + left == len(conformance.CHECKS)
    with pytest.raises(SystemExit):
        main(["other"])


class Liar(ScriptedEngine):
    """Breaks promises about numbers, versions and stops, one each."""

    async def generate(self, request: GenerationRequest, heard: Heard | None = None) -> Generated:
        made = await super().generate(request)
        made.logprobs[:] += 0.01
        if heard:
            heard(made)
            heard(made)
        return made

    async def alias(self, version: int) -> None:
        self.served_version = version

    async def install(self, version: int) -> None:
        self.served_version = min(self.served_version, version)
        await super().install(version)


class Liars(Tables):
    def engine(
        self, *, slots: int, max_context: int, stop_tokens: tuple[int, ...] = (), seed: int = 0
    ) -> Liar:
        return Liar(
            max_context=max_context, slots=slots, seed=seed, vocabulary=16, stop_tokens=stop_tokens
        )


async def test_broken_promises_are_found_each_by_its_check() -> None:
    findings = await examine(Liars())

    assert findings.failed.keys() >= {
        "greedy_takes_the_likeliest",
        "every_token_states_the_version_that_sampled_it",
        "what_serves_nothing_has_no_alias",
        "versions_never_go_back",
        "what_is_heard_is_what_is_returned",
        "what_is_honoured_shapes_what_is_sampled",
    }
    assert "a_seed_fixes_what_is_sampled" in findings.passed
    assert not measures(findings)[-1].holds
