"""Cases of rewards and advantages. What they call rollout is an episode.

Shapes: B = rows, T = places of a row.
"""

from typing import Any

import numpy as np
from arrays import Arrays, Case

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core import alignment, rewards
from treadle_trainer.core.advantages import whiten as whitened
from treadle_trainer.core.advantages.batch_mean import BatchMean
from treadle_trainer.core.advantages.dr_grpo import DrGrpo
from treadle_trainer.core.advantages.gae import gae
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.advantages.on_policy_distill import on_policy_distill
from treadle_trainer.core.advantages.reinforce import returns_to_go, token_rewards
from treadle_trainer.core.advantages.reinforce_baseline import ReinforceBaseline
from treadle_trainer.core.advantages.rloo import Rloo

GROUP_ESTIMATORS = {
    "grpo": Grpo(),
    "dr_grpo": DrGrpo(),
    "rloo": Rloo(),
    "reinforce_baseline": ReinforceBaseline(),
}


class RewardCases(Arrays):
    """Functions by the names of the cases."""

    def align_trajectory(self, inputs: Case, params: Case) -> Case:
        logprobs = inputs["rollout_log_probs"]
        found = alignment.align(
            inputs["n_tokens"],
            inputs["action_ranges"],
            None if logprobs is None else self.array(logprobs),
            max_tokens=params["max_len"],
        )
        if isinstance(found, alignment.Unusable):
            return {"dropped": found.value}
        return {
            "dropped": None,
            "action_mask": found.actions.tolist(),
            "rollout_log_probs": None if found.logprobs is None else found.logprobs.tolist(),
            "response_length": found.num_actions,
            "total_length": found.num_tokens,
            "response_clip": found.clipped,
        }

    def merge_rollouts(self, inputs: Case, params: Case) -> Case:
        return told(self.merged(inputs))

    def merged(self, inputs: Case) -> rewards.Merged:
        ids, groups = inputs.get("rollout_ids"), inputs.get("group_ids")
        return rewards.merge(self.array(inputs["rewards"]), ids, groups)

    def shape_overlong(self, inputs: Case, params: Case) -> Case:
        owners = np.array(inputs["sample_to_rollout"])
        before = self.array(inputs["rewards"])
        shaped = self.overlong(before, owners, inputs["context_length"], params)
        return {"rewards": shaped.tolist(), "penalty": (shaped - before)[owners].tolist()}

    def overlong(self, before: Any, owners: Any, lengths: Any, params: Case) -> Any:
        return rewards.shape_overlong(
            before,
            rewards.largest(np.array(lengths), owners),
            max_tokens=params["max_len"],
            buffer=params["buffer_len"],
            factor=params["factor"],
        )

    def shape_stop_properly(self, inputs: Case, params: Case) -> Case:
        owners = np.array(inputs["sample_to_rollout"])
        before = self.array(inputs["rewards"])
        shaped = self.stop_properly(before, owners, inputs["truncated"], params["coef"])
        return {"rewards": shaped.tolist(), "penalty": (shaped - before)[owners].tolist()}

    def stop_properly(self, before: Any, owners: Any, truncated: Any, coefficient: float) -> Any:
        flags = rewards.largest(np.array(truncated, np.bool_), owners)
        return rewards.shape_stop_properly(before, flags, coefficient=coefficient)

    def reward_pipeline(self, inputs: Case, params: Case) -> Case:
        merged = self.shaped(inputs, params)
        std = rewards.group_std(merged.rewards, merged.groups)
        return {**told(merged), "group_reward_std": std[merged.owners].tolist()}

    def shaped(self, inputs: Case, params: Case) -> rewards.Merged:
        """Merge where the estimator compares within groups, shape, clip."""
        if params["overlong_buffer_len"] is not None and params["stop_properly_coef"] is not None:
            raise InvalidFieldError("shaping", limit="one way", value="overlong and stop_properly")
        by_group = params["estimator"] in GROUP_ESTIMATORS
        ids = inputs if by_group else {"rewards": inputs["rewards"]}
        merged = self.merged(ids)
        found = merged.rewards
        if params["overlong_buffer_len"] is not None:
            named = {"buffer_len": params["overlong_buffer_len"], "max_len": params["max_len"],
                     "factor": params["overlong_factor"]}  # fmt: skip
            found = self.overlong(found, merged.owners, inputs["context_length"], named)
        if params["stop_properly_coef"] is not None:
            coefficient = params["stop_properly_coef"]
            found = self.stop_properly(found, merged.owners, inputs["truncated"], coefficient)
        if params["clip_range"] is not None:
            found = rewards.clip(found, *params["clip_range"])
        return rewards.Merged(found, merged.groups, merged.owners)

    def dynamic_filter(self, inputs: Case, params: Case) -> Case:
        reason = rewards.drop_reason(
            inputs["rollout_ids"],
            inputs["scores"],
            group_size=params["n_samples"],
            low=params["min"],
            high=params["max"],
        )
        return {"keep": reason is None, "reason": reason}

    def whiten(self, inputs: Case, params: Case) -> Case:
        mask = np.array(inputs["action_mask"], np.bool_)
        return {"values": whitened(self.array(inputs["values"]), mask).tolist()}

    def advantage(self, inputs: Case, params: Case) -> Case:
        estimator, mask = params["estimator"], np.array(inputs["action_mask"], np.bool_)
        kl = None if inputs.get("kl") is None else self.array(inputs["kl"])
        if estimator in GROUP_ESTIMATORS or estimator == "flash_reinforce":
            found = self.of_episodes(inputs, params, mask)
            returns = self.of_episodes(inputs, {**params, "whiten": False}, mask)
            return {"advantages": found.tolist(), "returns": returns.tolist()}
        if estimator == "on_policy_distill":
            kl = self.array(np.zeros(mask.shape)) if kl is None else kl
            found = on_policy_distill(kl, mask, coefficient=params["kl_coef"])
            return {"advantages": found.tolist(), "returns": found.tolist()}
        known = ~np.isnan(self.array(inputs["rewards"]))
        mask &= known[:, None]  # a missing reward leaves its row out
        given = np.where(known, self.array(inputs["rewards"]), 0)
        at_tokens = token_rewards(given, mask, kl, kl_coefficient=params["kl_coef"])
        if estimator == "gae":
            values = self.array(inputs["values"])
            estimate = gae(at_tokens, values, mask, gamma=params["gamma"], lam=params["lam"])
            found, returns = estimate.advantages, estimate.returns
        else:
            axis = params["discount_axis"]
            found = returns = returns_to_go(at_tokens, mask, gamma=params["gamma"], axis=axis)
        if params["whiten"]:
            found = whitened(found, mask)
        return {"advantages": found.tolist(), "returns": returns.tolist()}

    def of_episodes(self, inputs: Case, params: Case, mask: Any) -> Any:
        """Advantages that are the same at every token of an episode, [B, T]."""
        flash = params["estimator"] == "flash_reinforce"
        unit = {"segment": "segment", "rollout": "episode"}[params["unit"]]
        if params["estimator"] == "reinforce_baseline":
            plugin: Any = ReinforceBaseline(whiten=bool(params["whiten"]))
        else:
            plugin = BatchMean(unit=unit) if flash else GROUP_ESTIMATORS[params["estimator"]]
        merged = self.merged(inputs)
        tokens = np.bincount(merged.owners, mask.sum(1)).astype(np.int64)
        segments = np.bincount(merged.owners)
        found = plugin(merged.rewards, merged.groups, tokens, segments).values[merged.owners]
        return np.where(mask, found[:, None], 0)


def told(merged: rewards.Merged) -> Case:
    """Groups as lists of their members, in order of appearance."""
    return {
        "rewards": merged.rewards.tolist(),
        "groups": [np.flatnonzero(merged.groups == g).tolist() for g in np.unique(merged.groups)],
        "sample_to_rollout": merged.owners.tolist(),
    }
