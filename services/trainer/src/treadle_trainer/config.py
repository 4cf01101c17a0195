"""What the trainer and `treadle sft` are told. Imports nothing heavy."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from treadle_runtime.config import Addresses, Config, ServiceConfig
from treadle_runtime.plugins import PluginConfig, of_group

_ABSENT = {
    "gae": "the values of a critic",
    "on_policy_distill": "the log-probabilities of a teacher",
}
"""Estimators of `treadle_trainer.core.advantages` that want what no trainer has yet."""


def _has_what_it_wants(config: PluginConfig) -> PluginConfig:
    if config.name in _ABSENT:
        raise ValueError(f"{config.name} wants {_ABSENT[config.name]}, which no trainer has yet")
    return config


AdvantageConfig = Annotated[
    PluginConfig, AfterValidator(_has_what_it_wants), AfterValidator(of_group("treadle.advantages"))
]
AggregationConfig = Annotated[PluginConfig, AfterValidator(of_group("treadle.aggregations"))]
CorrectionConfig = Annotated[PluginConfig, AfterValidator(of_group("treadle.corrections"))]
BackendConfig = Annotated[PluginConfig, AfterValidator(of_group("treadle.backends"))]
DemonstrationsConfig = Annotated[PluginConfig, AfterValidator(of_group("treadle.demonstrations"))]
LossConfig = Annotated[PluginConfig, AfterValidator(of_group("treadle.losses"))]
TransportConfig = Annotated[PluginConfig, AfterValidator(of_group("treadle.weight_transports"))]
Rate = Annotated[float, Field(ge=0, lt=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class OptimizerConfig(Config):
    """AdamW and what is done to its gradient."""

    learning_rate: Finite = Field(gt=0)
    """Constant after the warm-up."""
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    epsilon: Finite = Field(default=1e-8, gt=0)
    weight_decay: Finite = Field(default=0.0, ge=0)
    """Of matrices; vectors have none."""
    max_grad_norm: Finite = Field(default=1.0, gt=0)
    """Global norm that the gradient is clipped to."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly."""

    @property
    def backend_parameters(self) -> dict[str, Any]:
        """What a backend's constructor takes of it."""
        return self.model_dump(include={"betas", "epsilon", "weight_decay"})


class KlConfig(Config):
    """A divergence from a reference, added to the loss."""

    coefficient: Finite = Field(gt=0)
    """What its mean over tokens is multiplied with."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    reference: Literal["rollout", "model"] = "rollout"
    """`rollout`: the log-probabilities that came with the tokens."""
    use: Literal["loss", "reward"] = "loss"
    target: Finite | None = None
    """Divergence that an adaptive coefficient aims at."""

    @model_validator(mode="after")
    def _can_be_had(self) -> Self:
        if self.reference == "model":
            raise ValueError("reference: expected rollout, since no trainer has a reference model")
        if self.use == "reward":
            raise ValueError(
                "use: expected loss, since rewards are told before log-probabilities are computed"
            )
        if self.target is not None:
            raise ValueError(
                "target: expected none, since checkpoints do not hold an adaptive coefficient"
            )
        if self.estimator == "k1":
            raise ValueError(
                "estimator: expected k2 or k3, since the gradient of k1 pushes the policy away from"
                " the one that sampled"
            )
        return self


class OverlongConfig(Config):
    """A ramp: what an episode loses whose longest segment nears a limit."""

    max_tokens: int = Field(gt=0)
    """Tokens of the longest segment, prompt and observations included, at which all is lost."""
    buffer: int = Field(gt=0)
    """Tokens before that, over which it is lost more and more."""
    factor: Finite = Field(default=1.0, gt=0)
    """Reward lost at the end of the ramp."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.buffer > self.max_tokens:
            raise ValueError(
                f"buffer: expected at most max_tokens {self.max_tokens}, got {self.buffer}"
            )
        return self


class ShapingConfig(Config):
    """What is made of rewards before advantages, once an episode: shape, then clip."""

    overlong: OverlongConfig | None = None
    stop_properly: Finite | None = Field(default=None, le=1)
    """What a truncated episode keeps of its reward; below 0, what it gets instead."""
    clip: tuple[Finite, Finite] | None = None
    """Least and greatest reward."""

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        if self.overlong is not None and self.stop_properly is not None:
            raise ValueError(
                "stop_properly: expected none beside overlong, since both are for episodes that do"
                " not end"
            )
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip: expected the least reward first, got {list(self.clip)}")
        return self


class TrainerConfig(ServiceConfig):
    """The trainer: its peers, its plugins, and how often it saves."""

    experience_address: Addresses
    """Address of the experience service, or those of all processes that may serve it."""
    refit_address: str
    """Address of the refit service."""
    optimizer: OptimizerConfig
    advantage: AdvantageConfig = PluginConfig(name="grpo")
    """Plugin of `treadle.advantages`."""
    shaping: ShapingConfig | None = None
    loss: LossConfig = PluginConfig(name="ppo_clip")
    """Plugin of `treadle.losses`."""
    aggregation: AggregationConfig = PluginConfig(name="token_mean")
    """Plugin of `treadle.aggregations`: how the losses of tokens become one."""
    form: Literal["direct", "decoupled"] = "direct"
    """What the ratio of the loss is taken to: the policy that sampled, as recorded, or the one
    before the step, with a correction for the difference."""
    correction: CorrectionConfig | None = None
    """Plugin of `treadle.corrections`: for what sampler and trainer differ in."""
    kl: KlConfig | None = None
    entropy_bonus: Finite = Field(default=0.0, ge=0)
    """What the mean entropy of a token, in nats, is multiplied with before the loss loses it."""
    backend: BackendConfig = PluginConfig(name="single")
    """Plugin of `treadle.backends`."""
    transport: TransportConfig = PluginConfig(name="shared_memory")
    """Plugin of `treadle.weight_transports`; the same as refit's and rollout's."""
    microbatch_tokens: int = Field(default=4096, gt=0)
    """Most tokens of one forward and backward pass, and so of one segment."""
    ranks: int = Field(default=1, gt=0)
    """Data-parallel ranks, each with the whole model; under torchrun its number of processes."""
    rank_timeout_s: Finite = Field(default=60.0, ge=1)
    """Silence of a rank after which the others end, so that all are started again."""
    prefetch_bytes: int = Field(default=256 * 2**20, ge=0)
    """Most bytes of payloads of coming steps that a rank reads ahead; 0: none."""
    checkpoint_every: int = Field(default=10, gt=0)
    """Steps between checkpoints; the start and the last step always get one."""
    publish_every: int = Field(default=1, gt=0)
    """Steps between publications; the start and the last step are always published."""
    no_progress_s: Finite = Field(default=600.0, gt=0)
    """Seconds without a batch after which an alarm is given, and given again."""

    @model_validator(mode="after")
    def _nothing_silently_wrong(self) -> Self:
        correction = self.correction
        if self.form == "decoupled" and correction is None:
            raise ValueError(
                "correction: expected a plugin with form decoupled, since nothing else makes up for"
                " the policy that sampled ({name: gated, level: off} says that nothing shall)"
            )
        if self.form == "direct" and self.loss.name == "reinforce":
            raise ValueError(
                "form: expected decoupled with loss reinforce, since it has no ratio: without a"
                " correction it takes tokens of older versions for its own"
            )
        weighs = correction is not None and (
            correction.name == "tis"
            or correction.parameters.get("mode", "mask") != "mask"
            or correction.parameters.get("level") == "off"
        )
        if self.form == "direct" and weighs:
            raise ValueError(
                "form: expected decoupled with a correction that weighs, since the ratio of form"
                " direct weighs the same tokens already"
            )
        return self


class SftModelConfig(Config):
    """The policy to train: a folder to go on from, or a config and a tokenizer to begin with."""

    folder: Path | None = None
    """Hugging Face folder with parameters and tokenizer."""
    config: Path | None = None
    """config.json of a policy with random parameters."""
    tokenizer: Path | None = None
    """Folder of its tokenizer."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        given = (self.folder is not None, self.config is not None, self.tokenizer is not None)
        if given not in ((True, False, False), (False, True, True)):
            raise ValueError("expected either folder, or config and tokenizer")
        return self


class SftConfig(Config):
    """Recipe of `treadle sft`."""

    model: SftModelConfig
    demonstrations: DemonstrationsConfig
    """Plugin of `treadle.demonstrations`: its `read(index)` returns a Demonstration."""
    steps: int = Field(gt=0)
    """Optimiser steps."""
    batch_size: int = Field(gt=0)
    """Demonstrations of a step; step s reads the indices (s - 1) * batch_size and on."""
    optimizer: OptimizerConfig
    decay_at: float = Field(default=1.0, ge=0, le=1)
    """Share of the steps after which the learning rate drops."""
    decay_factor: Finite = Field(default=1.0, gt=0)
    """What it is multiplied with then."""
    microbatch_tokens: int = Field(default=4096, gt=0)
    """Most tokens of one forward and backward pass, and so of one demonstration."""
    backend: BackendConfig = PluginConfig(name="single")
    """Plugin of `treadle.backends`."""
    seed: int = 0
    """Of the random parameters."""
    output: Path
    """Hugging Face folder to write; one that exists is replaced at the end."""
