"""The trainer's functions under the names and in the layout of the golden cases.

No mathematics here: arrays are made, flattened and laid out, and names are translated.
"""

from collections.abc import Callable

import numpy as np
import torch
from arrays import Case, laid
from loss_cases import LossCases
from reward_cases import RewardCases

from treadle_trainer.core import kl as kls

NAMES = (
    "align_trajectory",
    "merge_rollouts",
    "shape_overlong",
    "shape_stop_properly",
    "reward_pipeline",
    "dynamic_filter",
    "whiten",
    "advantage",
    "kl_estimate",
    "kl_controller",
    "is_correction",
    "mismatch_metrics",
    "policy_loss",
    "aggregate",
    "score_centering",
    "policy_objective",
    "pipeline",
    "value_loss",
    "token_logprob",
)


class Adapter(RewardCases, LossCases):
    """All of them in one precision."""

    def functions(self) -> dict[str, Callable[[Case, Case], Case]]:
        """By name."""
        return {name: getattr(self, name) for name in NAMES}

    def pipeline(self, inputs: Case, params: Case) -> Case:
        merged = self.shaped(inputs, params)
        mask = np.array(inputs["action_mask"], np.bool_)
        old = self.flat(inputs["old_log_probs"])
        kl = None
        if params["kl_as_reward"]:
            divergence = kls.Kl(1.0, params["kl_estimator"], params["kl_ref"], as_loss=False)
            name = {"model": "ref_log_probs", "rollout": "rollout_log_probs"}[params["kl_ref"]]
            found = divergence(old, self.flat(inputs[name]), torch.from_numpy(mask.flatten()))
            kl = laid(found, len(mask))
        given = {**inputs, "kl": kl, "rewards": merged.rewards[merged.owners].tolist()}
        advantages = self.advantage(given, {**params, "kl_coef": params["adv_kl_coef"]})
        given |= {"advantages": advantages["advantages"], "prompt_ids": inputs["group_ids"]}
        found = self.policy_objective(given, params)
        return {**found, "advantages": advantages["advantages"]}
