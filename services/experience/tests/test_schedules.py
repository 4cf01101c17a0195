"""Random schedules: replicas that lag and die, episodes that fail, trainers that restore.

Checked after every rule: the accounts add up, a second process that reads the journal holds the
same state, and no batch holds a token beyond the lag bound. At the end everybody behaves, and the
run must complete: no schedule may have led it into a corner.
"""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from treadle_core.tickets import Ticket
from treadle_experience.core import admission, steps, tickets
from treadle_experience.core.errors import StaleAttemptError
from treadle_experience.core.faults import FaultReason
from treadle_experience.core.filters.zero_variance import ZeroVariance
from treadle_experience.core.rules import Overdue
from treadle_experience.core.state import TaskState
from treadle_experience.core.transitions import from_body, kind_of, to_body

ANY = st.integers(0, 2**16)


@dataclass
class Replica:
    name: str
    version: int = 0
    running: dict[str, tuple[Ticket, set[int]]] = field(default_factory=dict)

    def serve(self, version: int) -> None:
        self.version = version
        for _, sampled_by in self.running.values():
            sampled_by.add(version)


class Schedule(RuleBasedStateMachine):
    """Subclassed with `make_world` and `tools`."""

    make_world = None
    tools = None

    @initialize(
        max_lag=st.integers(0, 3),
        tasks_per_step=st.integers(1, 3),
        group_size=st.integers(1, 3),
        retries=st.integers(0, 2),
        num_tasks=st.integers(1, 24),
        num_steps=st.integers(1, 9),
        drop_last=st.booleans(),
        evaluated=st.sampled_from(["", "spanning", "exact"]),
        overdue=st.sampled_from(list(Overdue)),
        allowance=st.integers(0, 2),
        fewer=st.integers(0, 2),
        filtered=st.booleans(),
        adaptive=st.booleans(),
    )
    def begin(
        self, num_tasks, num_steps, evaluated, overdue, allowance, fewer, filtered, **rules
    ) -> None:
        rules |= {"overdue": overdue, "min_episodes": max(1, rules["group_size"] - fewer)}
        if overdue is Overdue.LATE:
            rules["max_overdue_lag"] = rules["max_lag"] + allowance
        evaluation = self.tools.evaluation(every=3, share=0.4, limit=2, exact=evaluated == "exact")
        self.world = (
            type(self)
            .make_world(
                num_tasks=num_tasks,
                steps=num_steps,
                evaluation=evaluation if evaluated else None,
                filter_=ZeroVariance() if filtered else None,
                **rules,
            )
            .start()
        )
        self.replicas = [Replica("r0", 1), Replica("r1", 1), Replica("r2", 1)]
        self.claimed = {}
        self.mended = False

    @rule(who=ANY, most=st.integers(1, 6))
    def lease(self, who, most) -> None:
        replica = self.replicas[who % 3]
        for ticket in self.world.lease(replica.version, most, replica=replica.name, slots=8):
            replica.running[ticket.episode_id] = (ticket, {replica.version})

    @rule(who=ANY, which=ANY, reward=st.sampled_from([0.0, 1.0, None]))
    def complete(self, who, which, reward) -> None:
        replica = self.replicas[who % 3]
        if replica.running:
            key = list(replica.running)[which % len(replica.running)]
            self._complete(replica, key, reward)

    def _complete(self, replica, key, reward) -> None:
        ticket, sampled_by = replica.running.pop(key)
        try:
            self.world.complete(ticket, versions=sampled_by, replica=replica.name, reward=reward)
        except StaleAttemptError:
            episode = self.world.state.episodes[key]
            assert (episode.state, episode.attempt) != ("issued", ticket.attempt)

    @rule(who=ANY, which=ANY, how=st.sampled_from(["fail", "expire", "return"]))
    def end(self, who, which, how) -> None:
        replica = self.replicas[who % 3]
        if not replica.running:
            return
        key = list(replica.running)[which % len(replica.running)]
        ticket, sampled_by = replica.running.pop(key)
        attempt = self.tools.attempt(ticket)
        if how == "fail":
            try:
                self.world.fail(ticket, replica=replica.name)
            except StaleAttemptError:
                episode = self.world.state.episodes[key]
                assert (episode.state, episode.attempt) != ("issued", ticket.attempt)
        elif how == "expire":  # it goes on as a zombie
            tickets.expire(self.world.run, [attempt])
            replica.running[key] = (ticket, sampled_by)
        else:
            tickets.give_back(self.world.run, replica_id=replica.name, attempts=[attempt])

    @rule(who=ANY)
    def die(self, who) -> None:
        replica = self.replicas[who % 3]
        tickets.expire(self.world.run, [self.tools.attempt(t) for t, _ in replica.running.values()])
        replica.running.clear()

    @rule(who=ANY)
    def renew(self, who) -> None:
        self._renew(self.replicas[who % 3])

    def _renew(self, replica) -> None:
        held = [self.tools.attempt(t) for t, _ in replica.running.values()]
        _, revoked = tickets.renew(
            self.world.run, replica_id=replica.name, served_version=replica.version, attempts=held
        )
        for attempt in revoked:
            del replica.running[attempt.episode_id]

    @rule(who=ANY)
    def refit(self, who) -> None:
        self.replicas[who % 3].serve(self.world.state.newest_version)

    @rule(publish=st.booleans(), wait_s=st.sampled_from([0.0, 0.5]))
    def train(self, publish, wait_s=0.0) -> None:
        step = self.world.state.trained_step + 1
        claim = self.world.claim(step)
        if not claim.tasks:
            return
        rules = self.world.rules
        members = [(t.task_id, [e.episode_id for e, _ in t.episodes]) for t in claim.tasks]
        assert self.claimed.setdefault(step, members) == members
        assert claim.last or len(members) == rules.tasks_per_step or self.mended
        order = [task_id for _, batch in sorted(self.claimed.items()) for task_id, _ in batch]
        assert order == sorted(order) or rules.overdue is Overdue.LATE
        for task in claim.tasks:
            assert rules.enough <= len(task.episodes) <= rules.group_size
            for episode, oldest in task.episodes:
                assert step - 1 - oldest <= rules.lag_limit
                assert episode.result is not None
                assert episode.inline is not None
        self.world.report(step, wait_s=wait_s, train_s=1.0)
        if publish:
            self.world.publish(step)

    @rule(whom=st.lists(st.tuples(ANY, st.sampled_from(list(FaultReason))), max_size=3))
    def hand_back(self, whom) -> None:
        step = self.world.state.trained_step + 1
        members = [e for t in self.world.claim(step).tasks for e, _ in t.episodes]
        said = [(members[which % len(members)], why) for which, why in whom if members]
        if members:
            self.world.hand_back(step, *said)
            self.mended = True  # a place stays free where a later batch is recorded
            self.claimed = {s: m for s, m in self.claimed.items() if s < step or not said}

    @rule()
    def publish(self) -> None:
        self.world.publish(self.world.state.trained_step)

    @rule()
    def commit(self) -> None:
        # A trainer that repeats its steps from the same parent writes the same bytes.
        head, step = self.world.state.head(), self.world.state.trained_step
        self.world.checkpoint(step, f"{head.digest}/{step}")

    @rule(older=st.booleans())
    def restore(self, older) -> None:
        chosen = self.world.state.restorable()[-1 if older else 0]
        step = self.world.acquire(f"holder-{self.world.state.position}", chosen.digest)
        self.world.publish(step)

    @invariant()
    def accounts_add_up(self) -> None:
        account = self.world.account()
        assert account.missing() == set()
        assert account.double_counted() == set()
        assert account.trained_twice() == set()
        assert len(account.acknowledged) == sum(map(len, account.places.values()))

    @invariant()
    def the_window_is_bounded(self) -> None:
        state, rules = self.world.state, self.world.rules
        assert len(state.window) <= rules.bound
        if admission.baseline_is_pending(state):
            assert state.num_opened == 0

    @invariant()
    def a_reader_of_the_journal_holds_the_same_state(self) -> None:
        assert self.world.reload() == self.world.state

    @precondition(lambda self: self.world.state.position > 40)
    @rule()
    def the_journal_is_json(self) -> None:
        for transition in self.world.save()[-20:]:
            inline = getattr(transition, "inline", None)
            assert from_body(kind_of(transition), to_body(transition), inline) == transition

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for _ in range(400):
            if steps.is_complete(self.world.run):
                break
            self._behave()
        assert steps.is_complete(self.world.run), self.world.state
        pending = (TaskState.OPEN, TaskState.READY, TaskState.CLAIMED, TaskState.TRAINED)
        assert not any(self.world.state.task_counts[state] for state in pending)
        self.accounts_add_up()

    def _behave(self) -> None:
        for replica in self.replicas:
            replica.serve(self.world.state.newest_version)
            self._renew(replica)
            for key in list(replica.running):
                self._complete(replica, key, 1.0)
            leased = self.world.lease(replica.version, replica=replica.name, slots=8)
            replica.running |= {t.episode_id: (t, {replica.version}) for t in leased}
        orphans = [
            tickets.Attempt(id_, self.world.state.episodes[id_].attempt)
            for replica in self.replicas
            for id_ in self.world.state.running.get(replica.name, {})
            if id_ not in replica.running
        ]
        tickets.expire(self.world.run, orphans)
        self.train(publish=True)
        if self.world.state.versions[self.world.state.newest_version].step < (
            self.world.state.trained_step
        ):
            self.publish()
        head = self.world.state.head()
        if head.step < self.world.state.trained_step:
            self.commit()


def test_no_schedule_breaks_a_promise_or_stops_the_run(make_world, tools) -> None:
    machine = type("Bound", (Schedule,), {"make_world": staticmethod(make_world), "tools": tools})

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
