"""The promises, one check each."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np

from treadle_agents.record import Generated
from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Sampling
from treadle_rollout.conformance import hearing, images, samplings
from treadle_rollout.conformance.subject import (
    TOLERANCE,
    Check,
    Ids,
    NotApplicableError,
    Subject,
    check_logprobs,
    check_shapes,
    check_turn,
    install,
    of_a_model,
    prompt,
    raises,
    request,
    require,
    serving,
)
from treadle_rollout.core.errors import (
    ContextOverflowError,
    EngineClosedError,
    NonFiniteLogprobError,
)
from treadle_rollout.ports import Engine, GenerationRequest


async def serves_nothing_before_the_first_install(subject: Subject) -> None:
    """`served_version` is 0 and calls wait; the first install lets them run."""
    engine = subject.engine(slots=2, max_context=32)
    try:
        require(engine.served_version == 0, "a new engine serves version 0")
        ids = prompt(subject, 4)
        early = asyncio.create_task(engine.generate(request("a", ids, max_tokens=3)))
        await install(engine, subject, 7)
        require(engine.served_version == 7, "served_version is what was installed")
        check_turn(subject, ids, await early, 1.0)
    finally:
        await engine.close()


@of_a_model
async def logprobs_are_those_of_a_fresh_forward(subject: Subject) -> None:
    """At every temperature, over sessions of many turns that join and leave."""
    async with serving(subject, slots=4, max_context=48) as engine:
        await asyncio.gather(
            *(
                _session(engine, subject, f"s{i}", seed=i, temperature=temperature)
                for i, temperature in enumerate((0.6, 1.0, 1.5) * 3)
            )
        )


async def _session(
    engine: Engine, subject: Subject, name: str, *, seed: int, temperature: float
) -> None:
    """Turns of one session, each extending the one before, until the context is full."""
    ids = prompt(subject, 3 + seed % 5, seed=seed)
    turns: list[tuple[int, Generated]] = []
    while ids.size < engine.max_context:
        turn = await engine.generate(request(name, ids, 5 + seed % 4, temperature=temperature))
        turns.append((ids.size, turn))
        reply = prompt(subject, 1 + seed % 3, seed=seed)
        ids = np.concatenate([ids, turn.token_ids, reply])
    engine.release(name)
    # A token's log-probability depends on what lies before it: one forward serves all turns.
    fresh = subject.logprobs(1, ids, temperature)
    for start, turn in turns:
        check_shapes(turn)
        of_turn = fresh[start - 1 : start - 1 + turn.token_ids.size]
        check_logprobs(1, of_turn, turn.logprobs)


async def greedy_takes_the_likeliest(subject: Subject) -> None:
    """Temperature 0 reports the log-probability at temperature 1, and no token is likelier."""
    async with serving(subject, slots=2, max_context=32) as engine:
        ids = prompt(subject, 5)
        turn = await engine.generate(request("a", ids, max_tokens=6, temperature=0.0))
        check_turn(subject, ids, turn, 1.0)
        for size in range(turn.token_ids.size):
            before = np.concatenate([ids, turn.token_ids[:size]])
            best = max(
                subject.logprobs(1, np.append(before, np.int32(token)), 1.0)[-1]
                for token in range(subject.vocabulary)
            )
            require(turn.logprobs[size] > best - TOLERANCE, "greedy took the likeliest token")


async def every_token_states_the_version_that_sampled_it(subject: Subject) -> None:
    """20 sessions over 10 swaps: all finish, and each token has its version's log-probability."""
    async with serving(subject, slots=21, max_context=64) as engine:
        turns = await _amid_swaps(engine, subject, 20, partial(install, engine, subject))
    spans = 0
    for ids, turn in turns:
        versions = np.unique(turn.policy_version)
        spans += versions.size > 1
        require(turn.length, "a turn ends as if nothing was swapped")
        require(bool(np.all(np.diff(turn.policy_version) >= 0)), "versions rise in a turn")
        check_turn(subject, ids, turn, 1.0)
    require(spans > 0, "weights were swapped while calls were in flight")


async def _amid_swaps(
    engine: Engine, subject: Subject, sessions: int, swap: Callable[[int], Awaitable[None]]
) -> list[tuple[Ids, Generated]]:
    """Turns of sessions that sample while versions 2 to 11 come, each after its prompt."""
    swapped = asyncio.Event()

    async def work(name: str, seed: int) -> list[tuple[Ids, Generated]]:
        turns: list[tuple[Ids, Generated]] = []
        while not swapped.is_set():
            ids = prompt(subject, 4, seed=seed + len(turns))
            turns.append((ids, await engine.generate(request(name, ids, 50))))
        return turns

    workers = [asyncio.create_task(work(f"s{i}", 100 * i)) for i in range(sessions)]
    for version in range(2, 12):
        # One token of another call proves that the swap happened amid decoding.
        await engine.generate(request("beat", prompt(subject, 3), max_tokens=2))
        await swap(version)
        require(engine.served_version == version, "what was swapped in is the served version")
    swapped.set()
    return [turn for worker in workers for turn in await worker]


@of_a_model
async def a_swap_leaves_nothing_of_the_old_weights(subject: Subject) -> None:
    """A ids cached before a swap gives what a cold engine at the new weights gives."""
    ids = prompt(subject, 9)
    async with serving(subject, slots=2, max_context=32) as engine:
        await engine.generate(request("a", ids, max_tokens=8, temperature=0.0))
        await install(engine, subject, 2)
        warm = await engine.generate(request("a", ids, max_tokens=8, temperature=0.0))
    async with serving(subject, slots=2, max_context=32, version=2) as engine:
        cold = await engine.generate(request("a", ids, max_tokens=8, temperature=0.0))
    require(bool(np.all(warm.policy_version == 2)), "tokens after a swap are the new version's")
    require(np.array_equal(warm.token_ids, cold.token_ids), "tokens equal a cold engine's")
    worst = float(np.abs(warm.logprobs - cold.logprobs).max())
    require(worst <= TOLERANCE, "log-probabilities equal a cold engine's")


async def the_arrival_buffer_may_change_after_an_install(subject: Subject) -> None:
    """What is written for the next version does not leak into the served one."""
    async with serving(subject, slots=2, max_context=32) as engine:
        engine.arrival[:] = 0xFF
        ids = prompt(subject, 6)
        check_turn(subject, ids, await engine.generate(request("a", ids, 8)), 1.0)
        await engine.install(1)
        check_turn(subject, ids, await engine.generate(request("b", ids, 8)), 1.0)


async def an_alias_changes_the_number_and_nothing_else(subject: Subject) -> None:
    """Calls go on over 10 aliases, whatever lies in `arrival`; tokens state the new number."""
    async with serving(subject, slots=4, max_context=64) as engine:
        engine.arrival[:] = 0xFF
        turns = await _amid_swaps(engine, subject, 3, engine.alias)
        await raises(InvalidFieldError, engine.alias(10))
        await install(engine, subject, 12)
        ids = prompt(subject, 5)
        check_turn(subject, ids, await engine.generate(request("a", ids, 8)), 1.0)
    require(
        any(np.unique(turn.policy_version).size > 1 for _, turn in turns),
        "the number changed while calls were in flight",
    )
    for ids, turn in turns:
        require(bool(np.all(np.diff(turn.policy_version) >= 0)), "versions rise in a turn")
        require(np.array_equal(turn.policy_version, turn.context_version), "keys have one version")
        whole = np.concatenate([ids, turn.token_ids])
        fresh = subject.logprobs(1, whole, 1.0)[ids.size - 1 :]
        require(bool(np.abs(fresh - turn.logprobs).max() <= TOLERANCE), "the weights stayed")


async def what_serves_nothing_has_no_alias(subject: Subject) -> None:
    """An alias needs weights that are served."""
    engine = subject.engine(slots=1, max_context=32)
    try:
        await raises(InvalidFieldError, engine.alias(1))
        require(engine.served_version == 0, "a refused alias changes nothing")
    finally:
        await engine.close()


async def versions_never_go_back(subject: Subject) -> None:
    """An older version than the served one is refused, and the served one stays."""
    async with serving(subject, slots=1, max_context=32, version=5) as engine:
        await raises(InvalidFieldError, engine.install(4))
        require(engine.served_version == 5, "a refused install changes nothing")


@of_a_model
async def sessions_never_mix(subject: Subject) -> None:
    """Equal beginnings, edited histories and reclaimed slots: every turn is its own."""
    async with serving(subject, slots=2, max_context=64) as engine:
        shared = prompt(subject, 12)
        for turn_ in range(3):
            for name in ("a", "b", "c"):
                ids = np.concatenate([shared[: 12 - turn_], prompt(subject, 5, seed=ord(name))])
                turn = await engine.generate(request(name, ids, max_tokens=6))
                check_turn(subject, ids, turn, 1.0)


async def overlapping_calls_of_a_session_are_each_their_own(subject: Subject) -> None:
    """Two branches of one session at once."""
    async with serving(subject, slots=3, max_context=64) as engine:
        many = [prompt(subject, 4 + i, seed=i) for i in range(4)]
        turns = await asyncio.gather(
            *(engine.generate(request("same", ids, max_tokens=12)) for ids in many)
        )
        for ids, turn in zip(many, turns, strict=True):
            check_turn(subject, ids, turn, 1.0)


async def calls_beyond_the_slots_wait_their_turn(subject: Subject) -> None:
    """More calls than slots: all finish, and with one slot in the order they came."""
    async with serving(subject, slots=1, max_context=32) as engine:
        order: list[int] = []

        async def call(number: int) -> None:
            ids = prompt(subject, 3, seed=number)
            turn = await engine.generate(request(f"s{number}", ids, max_tokens=4))
            order.append(number)
            check_turn(subject, ids, turn, 1.0)

        await asyncio.gather(*(call(number) for number in range(12)))
        require(order == sorted(order), f"first come, first served, not {order}")


async def a_cancelled_call_frees_its_slot(subject: Subject) -> None:
    """Whether it runs or waits; the next one gets the slot and its own tokens."""
    async with serving(subject, slots=1, max_context=2048) as engine:
        long = request("long", prompt(subject, 3), max_tokens=2040)
        running = asyncio.create_task(engine.generate(long))
        waiting = asyncio.create_task(engine.generate(long))
        ids = prompt(subject, 4)
        last = asyncio.create_task(engine.generate(request("short", ids, max_tokens=3)))
        await asyncio.sleep(0)
        for task in (waiting, running):
            task.cancel()
            await asyncio.wait([task])
            require(task.cancelled(), "a cancelled call ends as cancelled")
        check_turn(subject, ids, await last, 1.0)
        again = prompt(subject, 6, seed=9)
        turn = await engine.generate(request("long", again, max_tokens=3))
        check_turn(subject, again, turn, 1.0)


async def a_stop_token_ends_the_turn_and_is_part_of_it(subject: Subject) -> None:
    """`length` at `max_tokens` alone, and not where a stop token was sampled."""
    stops = (1, 3)
    async with serving(subject, slots=4, max_context=64, stop_tokens=stops) as engine:
        require(engine.stop_token_ids == frozenset(stops), "stop_token_ids are those asked for")
        seen: set[bool] = set()
        for seed in range(24):
            turn = await engine.generate(request(f"s{seed}", prompt(subject, 4, seed=seed), 4))
            engine.release(f"s{seed}")
            seen.add(turn.length)
            stopped = np.isin(turn.token_ids, stops)
            require(not stopped[:-1].any(), "nothing follows a stop token")
            require(bool(stopped[-1]) is not turn.length, "length means that no stop token came")
            size = turn.token_ids.size
            require(not turn.length or size == 4, "length means max_tokens")
        require(len(seen) == 2, "turns of both kinds were seen")


async def a_prompt_must_leave_room(subject: Subject) -> None:
    """A full context is refused with both numbers; one token of room gives one token."""
    async with serving(subject, slots=1, max_context=16) as engine:
        require(engine.max_context == 16, "max_context is what was asked for")
        error = await raises(
            ContextOverflowError, engine.generate(request("a", prompt(subject, 16), 4))
        )
        require("16" in error.message and error.value == "16", "the error names the numbers")
        ids = prompt(subject, 15)
        turn = await engine.generate(request("a", ids, max_tokens=4))
        require(turn.length, "a full context ends the turn for its length")
        require(turn.token_ids.size == 1, "one token fits")
        check_turn(subject, ids, turn, 1.0)


async def requests_outside_their_limits_are_refused(subject: Subject) -> None:
    """Each names its field and harms nobody."""
    async with serving(subject, slots=1, max_context=16) as engine:
        good = prompt(subject, 3)
        for ids, sampling in (
            (good[:0], Sampling(1.0, 4)),
            (np.array([-1], np.int32), Sampling(1.0, 4)),
            (np.array([2**31 - 1], np.int32), Sampling(1.0, 4)),
            (good, Sampling(-1.0, 4)),
            (good, Sampling(float("nan"), 4)),
            (good, Sampling(1.0, 0)),
        ):
            call = engine.generate(GenerationRequest("a", ids, sampling))
            require(bool((await raises(InvalidFieldError, call)).field), "the error has a field")
        check_turn(subject, good, await engine.generate(request("a", good, 4)), 1.0)


async def a_logprob_that_is_not_finite_fails_its_call_alone(subject: Subject) -> None:
    """It is counted, the others go on, and the slot is as good as new."""
    poisoned = subject.poisoned()
    if poisoned is None:
        raise NotApplicableError("one token cannot be poisoned alone")
    weights, token = poisoned
    async with serving(subject, slots=2, max_context=32) as engine:
        engine.arrival[:] = weights
        await engine.install(2)
        good = np.where((ids := prompt(subject, 6)) == token, (token + 1) % 8, ids).astype(np.int32)
        bad = np.append(good, np.int32(token))
        for lost_calls, name in enumerate(("a", "b"), 1):
            calls = (request(name, bad, 4), request("c", good, 4, temperature=0.0))
            lost, kept = await asyncio.gather(*map(engine.generate, calls), return_exceptions=True)
            require(isinstance(lost, NonFiniteLogprobError), f"the poisoned call fails: {lost}")
            require(isinstance(kept, Generated), f"the other call does not: {kept}")
            require(engine.non_finite == lost_calls, "calls that fail so are counted")
            again = await engine.generate(request(name, good, 4, temperature=0.0))
            same = isinstance(kept, Generated) and np.allclose(
                again.logprobs, kept.logprobs, atol=TOLERANCE, equal_nan=False
            )
            require(same, "the slot of the call that failed is as good as new")
        await install(engine, subject, 3)
        turn = await engine.generate(request("a", good, max_tokens=4))
        check_turn(subject, good, turn, 1.0)


async def a_seed_fixes_what_is_sampled(subject: Subject) -> None:
    """The same calls one after another give the same tokens; another seed gives others."""
    sampled: list[list[int]] = []
    for seed in (3, 3, 4):
        async with serving(subject, slots=2, max_context=32, seed=seed) as engine:
            turns = [
                await engine.generate(request("a", prompt(subject, 4), max_tokens=10))
                for _ in range(2)
            ]
            sampled.append([int(token) for turn in turns for token in turn.token_ids])
    require(sampled[0] == sampled[1], "one seed, one sequence")
    require(sampled[0] != sampled[2], "another seed, another sequence")


async def close_fails_what_is_open(subject: Subject) -> None:
    """Running and waiting calls end with EngineClosedError, as do later ones."""
    async with serving(subject, slots=1, max_context=2048) as engine:
        long = request("a", prompt(subject, 3), max_tokens=2040)
        calls = [asyncio.create_task(engine.generate(long)) for _ in range(2)]
        await asyncio.sleep(0)
        await engine.close()
        for call in calls:
            await raises(EngineClosedError, call)
        await raises(EngineClosedError, engine.generate(long))
        await raises(EngineClosedError, engine.install(2))
        await raises(EngineClosedError, engine.alias(2))
        engine.release("a")


CHECKS: tuple[Check, ...] = (
    serves_nothing_before_the_first_install,
    logprobs_are_those_of_a_fresh_forward,
    greedy_takes_the_likeliest,
    every_token_states_the_version_that_sampled_it,
    a_swap_leaves_nothing_of_the_old_weights,
    the_arrival_buffer_may_change_after_an_install,
    an_alias_changes_the_number_and_nothing_else,
    what_serves_nothing_has_no_alias,
    versions_never_go_back,
    sessions_never_mix,
    overlapping_calls_of_a_session_are_each_their_own,
    calls_beyond_the_slots_wait_their_turn,
    a_cancelled_call_frees_its_slot,
    a_stop_token_ends_the_turn_and_is_part_of_it,
    a_prompt_must_leave_room,
    requests_outside_their_limits_are_refused,
    a_logprob_that_is_not_finite_fails_its_call_alone,
    a_seed_fixes_what_is_sampled,
    close_fails_what_is_open,
    *hearing.CHECKS,
    *samplings.CHECKS,
    *images.CHECKS,
)
"""All that an engine must pass."""
