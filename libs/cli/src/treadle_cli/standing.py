"""Where a run stands: what its rows of metrics add up to. No files, and no clock.

A life is one `treadle train`, from the start of its services to their end. Curves go over all
lives of a run; speed, waits and warnings are those of the last one.
"""

from dataclasses import dataclass, field

from treadle_cli.rows import Row

HOPELESS = 200
"""Attempts that fail in the agent, from the first on, after which none will do otherwise."""
_LONGEST_WHY = 300
"""Characters."""
PACE_STEPS = 20
"""Steps over which the time of a step is averaged."""


@dataclass(slots=True)
class Service:
    """A service in this life of the run."""

    pid: int
    is_up: bool = True
    """Started, and no death of it is known; one that ended well counts as up."""
    deaths: int = 0
    last_death: Row = field(default_factory=Row)
    """Row `death`; empty when there was none."""


@dataclass(frozen=True, slots=True)
class Score:
    """What an evaluation set said at a step."""

    step: int
    score: float | None
    std_error: float | None
    num_scored: int
    num_failed: int


@dataclass(slots=True)
class Standing:
    """Give it every row of the run, in order; read what they say."""

    steps: int
    """Of the recipe."""
    rewards: dict[int, float] = field(default_factory=dict[int, float])
    """Mean reward by step; of a step that was trained again, the later one."""
    scores: dict[str, list[Score]] = field(default_factory=dict[str, list[Score]])
    """By evaluation set, in the order of their steps."""
    step: int = 0
    """The last one trained."""
    last_step: Row = field(default_factory=Row)
    """Row `step`; empty before the first."""
    transcript: Row = field(default_factory=Row)
    """The newest."""
    failure: Row = field(default_factory=Row)
    """The newest of this life."""
    time: float = 0.0
    """Of the last row, in Unix seconds."""
    began: float = 0.0
    """When this life began, in Unix seconds; 0 before there is one."""
    ended: int | None = None
    """Exit status of `treadle train`; None while it runs, and where it was killed."""
    services: dict[str, Service] = field(default_factory=dict[str, Service])
    engine: Row = field(default_factory=Row)
    """Newest row `rollout` of this life."""
    waits: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Share of its time that a service lately waited, by service and by whom or what it waited
    for."""
    step_times: list[float] = field(default_factory=list[float])
    """When the last steps of this life ended, in Unix seconds."""
    _version: Row = field(default_factory=Row)
    _counts: Row = field(default_factory=Row)
    _handed_back: int = 0
    _stalled_s: float = 0.0
    _installed_s: float = 0.0

    def fold(self, writer: str, row: Row) -> None:
        """Takes the next row; kinds that it has no use for change nothing."""
        self.time = row["time"]
        match writer, row["name"]:
            case "supervisor", "start":
                self._fold_start(row)
            case "supervisor", "death":
                service = self.services.setdefault(row["service"], Service(row["pid"]))
                service.is_up, service.last_death = False, row
                service.deaths += 1
            case "supervisor", "end":
                self.ended = row["status"]
            case "experience", "evaluation":
                self._fold_score(row)
            case "experience", "counts":
                self._fold_counts(row)
            case "refit", "version":
                self._fold_version(row)
            case "rollout", "rollout":
                self._fold_engine(row)
            case "rollout", "version":
                self._installed_s += row["install_s"]
            case "rollout", "transcript":
                self.transcript = row
            case "rollout", "failure":
                self.failure = row
            case "trainer", "step":
                self._fold_step(row)
            case "trainer", "no_progress":
                self._stalled_s = row["waited_s"]
            case "trainer", "handed_back":
                self._handed_back += 1
            case _:
                pass

    @property
    def is_complete(self) -> bool:
        """Nothing is left to do."""
        return self.ended == 0

    @property
    def is_hopeless(self) -> bool:
        """All that was tried in this life failed in the agent or its grader."""
        failed = self.engine.get("attempts_failed_environment", 0)
        done = self.engine.get("attempts_completed", 0)
        return failed >= HOPELESS and not done and not self.step_times

    @property
    def why(self) -> str:
        """Why the newest failed attempt did, in a line; empty where none is known."""
        first, *_ = str(self.failure.get("message", "")).splitlines() or [""]
        return first[:_LONGEST_WHY]

    @property
    def phase(self) -> str:
        """What the run does now, in a word or two."""
        if self.ended is not None:
            return {0: "complete", 130: "drained"}.get(self.ended, "failed")
        if not self._version:
            return "starting"
        if self.step >= self.steps:
            return "scoring the end"
        return "training" if self.step_times else "sampling"

    def left_s(self, now: float) -> float | None:
        """Seconds to the last step, at the pace of the last ones; None where there is no pace."""
        times = self.step_times
        if len(times) < 2 or self.ended is not None:
            return None
        pace_s = (times[-1] - times[0]) / (len(times) - 1)
        return max(0.0, pace_s * (self.steps - self.step) - (now - times[-1]))

    def warnings(self) -> dict[str, str]:
        """What a person should know, a line each by its kind, worst first."""
        counts = self._counts
        failed = ", ".join(
            f"{count} {key.removeprefix('failures_')}"
            for key, count in counts.items()
            if key.startswith("failures_") and count
        )
        if failed and self.why:
            failed += f", the newest with: {self.why}"
        found = {
            f"death of {name}": f"{name} {_died(service)}"
            for name, service in self.services.items()
            if service.deaths
        }
        for kind, amount, text in (
            ("no progress", self._stalled_s, "{:.0f} s without a batch"),
            ("left behind", self._version.get("left_behind"), "{} engines left behind"),
            ("failed attempts", failed, "failed attempts: {}; logs/rollout.log says why"),
            (
                "no reward",
                self._unrewarded,
                "{} episodes, and none has a reward: nothing is learnt",
            ),
            ("non-finite", self.engine.get("non_finite"), "{} calls were not finite"),
            ("agents", self.engine.get("worker_restarts"), "agent workers restarted {} times"),
            ("payloads", counts.get("lost_payloads"), "{} payloads lost"),
            ("handed back", self._handed_back, "{} batches handed back by the trainer"),
            (
                "lossy",
                counts.get("durability") in ("none", "process"),
                "lossy: a crash of the ledger's host may lose what was acknowledged last",
            ),
        ):
            if amount:
                found[kind] = text.format(amount)
        return found

    @property
    def durability(self) -> str:
        """What the ledger declares; empty while nothing is known."""
        return str(self._counts.get("durability", ""))

    @property
    def _unrewarded(self) -> int:
        """Episodes of the last step, where none has a reward."""
        return 0 if "reward" in self.last_step else int(self.last_step.get("num_episodes", 0))

    def _fold_start(self, row: Row) -> None:
        name = row["service"]
        if not row["restarts"] and (not self.began or name in self.services):
            self._begin_life(row["time"])
        before = self.services.get(name)
        self.services[name] = Service(
            row["pid"],
            deaths=before.deaths if before else 0,
            last_death=before.last_death if before else {},
        )

    def _begin_life(self, time: float) -> None:
        self.began, self.ended = time, None
        self.services, self.waits, self.step_times = {}, {}, []
        self.engine, self.failure, self._version = {}, {}, {}
        self._handed_back, self._stalled_s, self._installed_s = 0, 0.0, 0.0

    def _fold_score(self, row: Row) -> None:
        score = Score(
            row["step"],
            row.get("score"),
            row.get("std_error"),
            row["num_scored"],
            row["num_failed"],
        )
        others = [s for s in self.scores.get(row["evaluation"], []) if s.step != score.step]
        self.scores[row["evaluation"]] = sorted([*others, score], key=lambda each: each.step)

    def _fold_counts(self, row: Row) -> None:
        before, self._counts = self._counts, row
        span_s = row.get("up_s", 0.0) - before.get("up_s", 0.0)
        if span_s > 0:
            busy_s = row["append_s"] - before.get("append_s", 0.0)
            self.waits["experience"] = {"work": _share(span_s - busy_s, span_s)}

    def _fold_version(self, row: Row) -> None:
        before, self._version = self._version, row
        if before:
            span_s = row["time"] - before["time"]
            self.waits["refit"] = {"work": _share(span_s - row["total_s"], span_s)}

    def _fold_engine(self, row: Row) -> None:
        before, self.engine = self.engine, row
        span_s = row["up_s"] - before.get("up_s", 0.0)
        if span_s > 0:
            waited_s = row["waited_s"] - before.get("waited_s", 0.0)
            self.waits["rollout"] = {
                "trainer": _share(waited_s, span_s),
                "refit": _share(self._installed_s, span_s),
            }
        self._installed_s = 0.0

    def _fold_step(self, row: Row) -> None:
        self.step, self.last_step, self._stalled_s = row["step"], row, 0.0
        while self.rewards and next(reversed(self.rewards)) >= self.step:
            self.rewards.popitem()  # taken back, and now trained again
        if "reward" in row:
            self.rewards[self.step] = row["reward"]
        parts_s = row["wait_s"] + row["train_s"] + row["publish_s"]
        span_s = row["time"] - self.step_times[-1] if self.step_times else parts_s
        self.waits["trainer"] = {
            "rollout": _share(row["wait_s"], span_s),
            "refit": _share(row["publish_s"], span_s),
        }
        self.step_times = [*self.step_times, row["time"]][-PACE_STEPS - 1 :]


def _share(part_s: float, whole_s: float) -> float:
    return min(max(part_s / max(whole_s, 1e-3), 0.0), 1.0)


def _died(service: Service) -> str:
    death = service.last_death
    how = f"signal {death['signal']}" if death["signal"] else f"status {death['status']}"
    times = f"died {service.deaths} times, last with" if service.deaths > 1 else "ended with"
    now = "was started again" if service.is_up else "is down"
    why = ", killed for memory" if death["memory_kill"] == "yes" else ""
    why = ", since it hung" if death.get("hung") else why
    return f"{times} {how}{why}, and {now}; its last line: {death['last_line']}"
