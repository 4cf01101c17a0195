"""Configuration of the experience service."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from treadle_core.ids import ID_PATTERN
from treadle_core.tickets import Sampling
from treadle_experience.core import rules
from treadle_runtime.config import Config, ServiceConfig
from treadle_runtime.plugins import PluginConfig, importable, of_group

TaskSourceConfig = Annotated[PluginConfig, AfterValidator(of_group("treadle.task_sources"))]
FilterConfig = Annotated[PluginConfig, AfterValidator(of_group("treadle.filters"))]
LedgerConfig = Annotated[PluginConfig, AfterValidator(importable("treadle.ledgers"))]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class SamplingConfig(Config):
    """How the policy samples. Nothing is taken from a checkpoint's generation config."""

    temperature: Finite = Field(default=1.0, ge=0)
    """Divides the logits; 0 is greedy."""
    max_tokens: int = Field(default=256, ge=1)
    """Most tokens that one turn may sample."""

    def build(self) -> Sampling:
        """The same as a value of the vocabulary."""
        return Sampling(self.temperature, self.max_tokens)


class EvaluationSetConfig(Config):
    """Held-out tasks that are scored together."""

    name: str = Field(pattern=rf"^{ID_PATTERN.pattern}$", max_length=64)
    """Names the score."""
    source: TaskSourceConfig
    """Plugin of `treadle.task_sources`."""
    limit: int = Field(ge=1)
    """Most tasks to take, from the source's first."""
    sampling: SamplingConfig = SamplingConfig()
    """How these episodes sample."""
    exact: bool = False
    """Count only episodes all of whose tokens are of the parameters that are scored: others are
    played again, up to `retries` times, and those that no engine serves any more have failed. With
    one replica that is all that has not ended when the next version is installed, so that such a
    score is of the fast episodes; the start and the last step are scored whole."""


class EvaluationConfig(Config):
    """When and how the policy is scored. The start and the last step always are."""

    every: int = Field(ge=1)
    """Steps between evaluations; a multiple of the trainer's `publish_every`."""
    share: float = Field(default=0.25, gt=0, le=1)
    """Part of a replica's slots that evaluation may take while training goes on."""
    sets: list[EvaluationSetConfig] = Field(min_length=1)
    """What is scored."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [chosen.name for chosen in self.sets]
        if len(set(names)) < len(names):
            raise ValueError(f"sets: expected distinct names, got {names}")
        return self

    def build(self) -> rules.EvaluationRules:
        """The same as a value of the core."""
        sets = tuple(
            rules.EvaluationSet(chosen.name, chosen.limit, chosen.sampling.build(), chosen.exact)
            for chosen in self.sets
        )
        return rules.EvaluationRules(self.every, self.share, sets)


class ExperienceConfig(ServiceConfig):
    """The section `experience` of a recipe, and where the service listens."""

    steps: int = Field(ge=0)
    """The last step, unless the tasks end before; 0 only scores the start parameters."""
    tasks_per_step: int = Field(ge=1)
    """Tasks in the batch of a step."""
    group_size: int = Field(ge=1)
    """Episodes of a task."""
    min_episodes: int | None = Field(default=None, ge=1)
    """Episodes with which a task is still used when others ran out of retries; all when absent."""
    max_lag: int = Field(ge=0)
    """Most steps between the policy that sampled a token and the one that trains on it; 0 is
    strictly on-policy."""
    window: Literal["fixed", "adaptive"] = "fixed"
    """Whether sampling runs as far ahead as `max_lag` allows, or no further than keeps the trainer
    fed."""
    overdue: Literal["wait", "late", "evict"] = "wait"
    """What becomes of a task that still runs when a batch could be formed without it: the batch
    waits for it, or passes over it, or evicts it."""
    max_overdue_lag: int | None = Field(default=None, ge=0)
    """Most steps that a task which was passed over may lag, for `overdue: late`."""
    filter: FilterConfig | None = None
    """Plugin of `treadle.filters`: which tasks are worth a place in a batch; all when absent."""
    payload_budget_bytes: int = Field(default=64 * 2**30, ge=1)
    """Bytes of payloads that may wait for a checkpoint; at 80 % the trainer is asked for one."""
    retries: int = Field(default=2, ge=0)
    """Failed or expired attempts of an episode that are issued again."""
    deadline_s: Finite = Field(gt=0)
    """Wall clock of one episode."""
    lease_s: Finite = Field(default=10.0, gt=0)
    """How long an episode stays with a replica that says nothing."""
    sampling: SamplingConfig = SamplingConfig()
    """How training episodes sample."""
    source: TaskSourceConfig
    """Plugin of `treadle.task_sources`: the training tasks."""
    last_batch: Literal["train", "drop"] = "train"
    """What happens to tasks that cannot fill the last batch."""
    evaluation: EvaluationConfig | None = None
    """Held-out scores; none when absent."""
    kept_tasks: int = Field(default=2048, ge=0)
    """Tasks without further use (trained beyond every restore, or left for good) that the service
    keeps records of, to answer a late duplicate as the first; when twice as many, it forgets."""
    keep_payloads: bool = False
    """Whether payloads that no restore needs stay as long as those records, so that
    `treadle export` finds them; `payload_budget_bytes` asks for no checkpoint then."""
    condense_after: int = Field(default=50_000, ge=1)
    """Transitions after which the ledger is condensed: a restart reads about as many, or a few
    times the records that the service has, whichever is more."""
    ledger: LedgerConfig = PluginConfig(name="sqlite")
    """Plugin of `treadle.ledgers`; `sqlite` is kept in the run's directory unless `path` is set,
    `redis` on a server of the run's own unless `url` is."""

    @model_validator(mode="after")
    def _lease_within_deadline(self) -> Self:
        if self.lease_s >= self.deadline_s:
            raise ValueError(
                f"lease_s: expected less than deadline_s {self.deadline_s:g}, got {self.lease_s:g}"
            )
        return self

    @model_validator(mode="after")
    def _enough_within_group(self) -> Self:
        if self.min_episodes is not None and self.min_episodes > self.group_size:
            raise ValueError(
                f"min_episodes: expected at most group_size {self.group_size}, "
                f"got {self.min_episodes}"
            )
        return self

    @model_validator(mode="after")
    def _overdue_lag_where_late(self) -> Self:
        late, limit = self.overdue == "late", self.max_overdue_lag
        if late and (limit is None or limit < self.max_lag):
            raise ValueError(
                f"max_overdue_lag: expected at least max_lag {self.max_lag} with overdue: late, "
                f"got {'nothing' if limit is None else limit}"
            )
        if limit is not None and not late:
            raise ValueError(
                f"max_overdue_lag: expected nothing with overdue: {self.overdue}, got {limit}"
            )
        return self

    def rules(self) -> rules.Rules:
        """The same as a value of the core."""
        return rules.Rules(
            run_id=self.run.id,
            steps=self.steps,
            tasks_per_step=self.tasks_per_step,
            group_size=self.group_size,
            max_lag=self.max_lag,
            min_episodes=self.min_episodes,
            payload_budget_bytes=self.payload_budget_bytes,
            adaptive=self.window == "adaptive",
            overdue=rules.Overdue(self.overdue),
            max_overdue_lag=self.max_overdue_lag,
            retries=self.retries,
            deadline_s=self.deadline_s,
            lease_s=self.lease_s,
            sampling=self.sampling.build(),
            drop_last=self.last_batch == "drop",
            evaluation=self.evaluation.build() if self.evaluation else None,
            kept_tasks=self.kept_tasks,
            keep_payloads=self.keep_payloads,
            condense_after=self.condense_after,
        )
