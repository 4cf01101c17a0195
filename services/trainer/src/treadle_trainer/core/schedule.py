"""How large the step of an optimiser is, as a function of the step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up to a constant rate, and optionally one drop."""

    learning_rate: float
    """The constant."""
    warmup_steps: int = 0
    """Steps until the rate is the constant, in equal parts; 0 for none."""
    decay_after: int | None = None
    """Last step before the drop; None for none."""
    decay_factor: float = 1.0
    """What the rate is multiplied with after it."""

    def __call__(self, step: int) -> float:
        """Learning rate of `step`, from 1."""
        rate = self.learning_rate
        if step < self.warmup_steps:
            rate *= step / self.warmup_steps
        if self.decay_after is not None and step > self.decay_after:
            rate *= self.decay_factor
        return rate
