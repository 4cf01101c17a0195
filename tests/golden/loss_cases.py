"""Cases of divergences, corrections, losses and what becomes of them.

Shapes: B = rows, T = places of a row, N = B * T.
"""

from itertools import chain

import numpy as np
import torch
from arrays import Arrays, Case, laid, segments_of

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core import kl as kls
from treadle_trainer.core import mismatch, rewards
from treadle_trainer.core import score_centering as centring
from treadle_trainer.core.aggregations import Aggregation, Shares, Window, weighted_mean
from treadle_trainer.core.aggregations.prompt_mean import PromptMean
from treadle_trainer.core.aggregations.sequence_mean import SequenceMean
from treadle_trainer.core.aggregations.token_mean import TokenMean
from treadle_trainer.core.corrections.gated import Gated
from treadle_trainer.core.logprobs import token_logprobs
from treadle_trainer.core.losses import Loss, Tokens
from treadle_trainer.core.losses.cispo import Cispo
from treadle_trainer.core.losses.clipped_value import clipped_value_loss
from treadle_trainer.core.losses.gspo import Gspo
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.objective import Denominators, Measured, Objective

AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": TokenMean(),
    "seq-mean-token-mean": SequenceMean(unit="segment"),
    "prompt-mean-token-mean": PromptMean(),
}


class LossCases(Arrays):
    """Functions by the names of the cases."""

    def kl_estimate(self, inputs: Case, params: Case) -> Case:
        mask = self.flat(inputs["action_mask"]).bool()
        logprobs = self.flat(inputs["log_probs"]).requires_grad_()
        divergence = kls.Kl(1.0, params["estimator"], params["ref"], bool(params["as_loss"]))
        found = divergence(logprobs, self.flat(inputs["ref_log_probs"]), mask)
        (grad,) = torch.autograd.grad(found.sum(), logprobs)
        mean = weighted_mean(found.detach(), torch.ones_like(found), mask, int(mask.sum()))
        rows = len(inputs["action_mask"])
        return {"kl": laid(found, rows), "grad": laid(grad, rows), "kl_mean": mean.item()}

    def kl_controller(self, inputs: Case, params: Case) -> Case:
        coefficient, used = params["init"], []
        for observed in inputs["observed"]:
            used.append(coefficient)
            if params["kind"] == "adaptive":
                coefficient = kls.next_coefficient(
                    coefficient,
                    observed,
                    target=params["target"],
                    horizon=params["horizon"],
                    num_samples=params["n_steps"],
                )
        return {"used": used, "final": coefficient}

    def is_correction(self, inputs: Case, params: Case) -> Case:
        rows = len(inputs["action_mask"])
        mask = self.flat(inputs["action_mask"]).bool()
        named = {"gate": params["gating"], "low": params["low"], "high": params["high"]}
        correction = Gated(params["level"], params["mode"], **named)
        compared = (
            self.flat(inputs["old_log_probs"]),
            self.flat(inputs["rollout_log_probs"]),
            mask,
        )
        found = correction(*compared, segments_of(inputs))
        sums = mismatch.mismatch_sums(*compared)
        by_token = found.statistic.shape == mask.shape
        count = max(int(mask.sum()), 1)
        return {
            "coef": laid(found.coefficients, rows),
            "stat": laid(found.statistic, rows) if by_token else found.statistic.tolist(),
            "filtered": found.rejected.sum().item() / count
            if by_token
            else found.rejected.tolist(),
            "vllm_kl": sums["mismatch_kl"].item() / count,
        }

    def mismatch_metrics(self, inputs: Case, params: Case) -> Case:
        mask = self.flat(inputs["action_mask"]).bool()
        compared = (self.flat(inputs["log_probs"]), self.flat(inputs["rollout_log_probs"]), mask)
        sums, count = mismatch.mismatch_sums(*compared), max(int(mask.sum()), 1)
        return {
            "abs_diff_mean": sums["mismatch_abs"].item() / count,
            "k3_kl": sums["mismatch_k3"].item() / count,
            "bitwise_frac": sums["mismatch_tokens"].item() / count,
        }

    def score_centering(self, inputs: Case, params: Case) -> Case:
        rows = len(inputs["action_mask"])
        mask = self.flat(inputs["action_mask"]).bool()
        head = self.flat(inputs["top_log_probs"]).requires_grad_()
        sampler = self.flat(inputs["rollout_top_log_probs"])
        found = centring.score_centering(head, sampler, mask, **params)
        (grad,) = torch.autograd.grad(found.corrections.sum(), head)
        count = max(int(mask.sum()), 1)
        return {
            "correction": laid(found.corrections, rows),
            "grad": laid(grad, rows),
            "sampler_head_mass": found.sampler_mass.sum().item() / count,
            "policy_head_mass": found.policy_mass.sum().item() / count,
        }

    def policy_loss(self, inputs: Case, params: Case) -> Case:
        rows = len(inputs["action_mask"])
        mask = self.flat(inputs["action_mask"]).bool()
        logprobs = self.flat(inputs["log_probs"]).requires_grad_()
        old, advantages = self.flat(inputs["old_log_probs"]), self.flat(inputs["advantages"])
        found = loss_of(params)(Tokens(logprobs, old, advantages, mask, segments_of(inputs)))
        (grad,) = torch.autograd.grad(found.losses.sum(), logprobs)
        count = max(int(mask.sum()), 1)
        return {
            "token_loss": laid(found.losses, rows),
            "token_grad": laid(grad, rows),
            "clip_ratio": found.sums["clip_fraction"].item() / count,
            "policy_kl": found.sums["kl_k1"].item() / count,
        }

    def aggregate(self, inputs: Case, params: Case) -> Case:
        mask = self.flat(inputs["action_mask"]).bool()
        losses = self.flat(inputs["token_loss"]).requires_grad_()
        aggregation = AGGREGATIONS[params["mode"]]
        tokens = np.array(inputs["action_mask"]).sum(1)
        shares = Shares(tokens, tokens, np.array(inputs["prompt_tokens"]))
        counts = (params["n_tokens"], params["n_seqs"], params["n_seqs"], params["n_prompts"])
        weights = self.tensor(aggregation.weights(shares))[segments_of(inputs)]
        normaliser = aggregation.normaliser(Window(*counts))
        # Our ranks add their gradients up, where the cases average them.
        loss = weighted_mean(losses, weights, mask, normaliser) * params["dp_size"]
        (grad,) = torch.autograd.grad(loss, losses)
        return {"loss": loss.item(), "grad": laid(grad, len(inputs["action_mask"]))}

    def policy_objective(self, inputs: Case, params: Case) -> Case:
        mask = torch.tensor(inputs["action_mask"]).bool()
        logprobs = self.tensor(inputs["log_probs"]).requires_grad_()
        heads = inputs.get("top_log_probs")
        head = None if heads is None else self.tensor(heads).requires_grad_()
        objective, aggregation = objective_of(params), AGGREGATIONS[params["agg"]]
        tokens = mask.sum(1).numpy()
        prompts = rewards.merge(tokens, None, inputs["prompt_ids"]).groups
        of_prompt = np.bincount(prompts, tokens).astype(np.int64)
        window = Window(
            int(tokens.sum()), len(tokens), len(tokens), int(np.count_nonzero(of_prompt))
        )
        weights = self.tensor(aggregation.weights(Shares(tokens, tokens, of_prompt[prompts])))
        over = Denominators(aggregation.normaliser(window), window.num_tokens)
        total = self.tensor(0.0)
        for rows in chain.from_iterable(params["partition"]):
            measured = self.measured(inputs, params, rows, mask, logprobs, weights, head)
            total = total + objective(loss_of(params), measured, over).loss
        total.backward()
        grads = {"grad": logprobs.grad} | ({"grad_top": head.grad} if head is not None else {})
        return {"total_loss": total.item()} | {
            name: (torch.zeros_like(logprobs) if grad is None else grad).tolist()
            for name, grad in grads.items()
        }

    def measured(
        self,
        inputs: Case,
        params: Case,
        rows: list[int],
        mask: torch.Tensor,
        logprobs: torch.Tensor,
        weights: torch.Tensor,
        head: torch.Tensor | None,
    ) -> Measured:
        """The rows of a micro-batch, end to end."""

        def given(name: str) -> torch.Tensor | None:
            matrix = inputs.get(name)
            return None if matrix is None else self.tensor(matrix)[rows].flatten(0, 1)

        old, mine = given("old_log_probs"), mask[rows].flatten()
        rollout, reference = given("rollout_log_probs"), given("ref_log_probs")
        if params["kl_ref"] == "rollout" and reference is not None:
            rollout = reference if rollout is None else rollout
        centred = None
        if head is not None:
            sampler = given("rollout_top_log_probs")
            mode = params["is_mode"] if params["is_level"] != "off" else "none"
            bounds = {"low": params["is_low"], "high": params["is_high"]}
            centred = centring.score_centering(
                head[rows].flatten(0, 1), sampler, mine, mode=mode, **bounds
            ).corrections
        entropy = given("entropy")
        return Measured(
            logprobs=logprobs[rows].flatten(),
            recorded=old if rollout is None else rollout,
            advantages=given("advantages"),
            weights=weights[rows].repeat_interleave(mask.shape[1]),
            mask=mine,
            segments=torch.arange(len(rows)).repeat_interleave(mask.shape[1]),
            entropy=torch.zeros_like(old) if entropy is None else entropy,
            proximal=old,
            reference=reference,
            centring=centred,
        )

    def value_loss(self, inputs: Case, params: Case) -> Case:
        mask = self.flat(inputs["action_mask"]).bool()
        values = self.flat(inputs["values"]).requires_grad_()
        others = (self.flat(inputs["old_values"]), self.flat(inputs["returns"]))
        losses, clipped = clipped_value_loss(values, *others, mask, clip=params["clip"])
        count = int(mask.sum())
        loss = weighted_mean(losses, torch.ones_like(losses), mask, count)
        (grad,) = torch.autograd.grad(loss, values)
        return {
            "loss": loss.item(),
            "grad": laid(grad, len(inputs["action_mask"])),
            "clip_frac": clipped.sum().item() / max(count, 1),
        }

    def token_logprob(self, inputs: Case, params: Case) -> Case:
        logits = self.tensor(inputs["logits"]).requires_grad_()
        temperatures = self.tensor([params["temperature"]] * len(logits))
        labels = torch.tensor(inputs["labels"])
        logprobs, entropy = token_logprobs(logits, labels, temperatures)
        (grad,) = torch.autograd.grad(logprobs.sum(), logits)
        named = {"log_probs": logprobs, "entropy": entropy, "grad": grad}
        return {name: found.tolist() for name, found in named.items()}


def loss_of(params: Case) -> Loss:
    """By the names of the cases."""
    low, high = params["eps_low"], params["eps_high"]
    if params["loss"] == "ppo":
        return PpoClip(low, high, params["dual_clip"])
    if params["dual_clip"] is not None:
        raise InvalidFieldError("dual_clip", limit="none but with ppo", value=params["dual_clip"])
    return Gspo(low, high) if params["loss"] == "gspo" else Cispo(high)


def objective_of(params: Case) -> Objective:
    """With the ratio taken to the given old log-probabilities, as the cases do."""
    level = params["is_level"]
    named = {"gate": params["is_gating"], "low": params["is_low"], "high": params["is_high"]}
    correction = Gated("off") if level == "off" else Gated(level, params["is_mode"], **named)
    kl = None
    if params["kl_coef"]:
        kl = kls.Kl(params["kl_coef"], params["kl_estimator"], params["kl_ref"])
    return Objective(
        form="decoupled", correction=correction, kl=kl, entropy_bonus=params["entropy_coef"]
    )
