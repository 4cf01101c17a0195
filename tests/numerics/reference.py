"""One optimiser step in float64 and plain loops, from the formulas of docs/algorithms.md alone.

Knows nothing of the project. An episode is a dict: `reward` (None where there is none), `group`,
and `segments`, each a list of tokens `(name, logp, recorded, entropy)`. The answer is the loss, and
its derivative by the log-probability and by the entropy of every token, by name.
"""

import math
from collections import defaultdict

CLAMP = 30.0


def mean(values):
    return math.fsum(values) / len(values)


def advantages(episodes, estimator):
    """Advantage of each episode, None where it does not enter."""
    known = [e for e in episodes if e["reward"] is not None]
    groups = defaultdict(list)
    for e in known:
        groups[e["group"]].append(e["reward"])

    def tokens(e):
        return sum(len(s) for s in e["segments"])

    def of(e):
        r, rewards = e["reward"], groups[e["group"]]
        n = len(rewards)
        same = all(x == rewards[0] for x in rewards)
        if estimator == "grpo":
            if n < 2 or same:
                return None
            m = mean(rewards)
            return (r - m) / (math.sqrt(math.fsum((x - m) ** 2 for x in rewards) / (n - 1)) + 1e-9)
        if estimator == "rloo":
            return r if n == 1 else r - (math.fsum(rewards) - r) / (n - 1)
        if estimator in ("dr_grpo", "reinforce_baseline"):
            return 0.0 if same else r - mean(rewards)
        if estimator == "batch_mean":
            return r - mean([e["reward"] for e in known])
        return r

    values = [None if e["reward"] is None else of(e) for e in episodes]
    if estimator in ("reinforce", "reinforce_baseline"):
        pairs = [(v, tokens(e)) for v, e in zip(values, episodes, strict=True) if v is not None]
        total = sum(n for _, n in pairs)
        if not total:
            return values
        m = math.fsum(v * n for v, n in pairs) / total
        std = math.sqrt(max(math.fsum((v - m) ** 2 * n for v, n in pairs) / total, 1e-8))
        values = [None if v is None else (v - m) / std for v in values]
    return values


def log_ratio(a, b):
    return max(-CLAMP, min(CLAMP, a - b))


def clipped(log_r, a, low, high):
    """-min(r A, clip(r) A), and its derivative by log r."""
    r = math.exp(log_r)
    bounded = min(max(r, 1 - low), 1 + high)
    if r * a <= bounded * a:
        return -r * a, -r * a
    return -bounded * a, 0.0


def token_loss(loss, segment, t, a, old):
    """Loss of a token, and its derivative by its own log-probability."""
    _, logp, _, _ = segment[t]
    log_r = log_ratio(logp, old(segment[t]))
    if loss == "ppo_clip":
        return clipped(log_r, a, 0.2, 0.28)
    if loss == "gspo":
        return clipped(mean([log_ratio(u[1], old(u)) for u in segment]), a, 0.05, 0.08)
    if loss == "cispo":
        weight = min(math.exp(log_r), 2.0)
        return -weight * a * logp, -weight * a
    return -a * logp, -a


def coefficient(correction, segment, t):
    """Of a token whose trainer's log-probability before the step is the present one."""
    ratios = [math.exp(log_ratio(u[1], u[2])) for u in segment]
    w = ratios[t]
    if correction == "tis":
        return min(w, 2.0)
    if correction == "icepop":
        return w if 0.5 <= w <= 2.0 else 0.0
    if correction == "mis":
        return w if 0.9 <= math.exp(mean([math.log(x) for x in ratios])) <= 1.1 else 0.0
    if correction == "binary_kl":

        def divergence(u):
            q, p = math.exp(u[2]), math.exp(u[1])
            q, p = (min(max(x, 1e-6), 1 - 1e-6) for x in (q, p))
            return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))

        return w if mean([divergence(u) for u in segment]) <= 0.02 else 0.0
    return 1.0


def step(episodes, *, estimator, loss, aggregation, correction=None, kl=0.0, bonus=0.0, length=8):
    values = advantages(episodes, estimator)
    entering = [(e, v) for e, v in zip(episodes, values, strict=True) if v is not None]
    counted = {id(e): sum(len(s) for s in e["segments"]) for e, _ in entering}
    prompts = defaultdict(int)
    for e, _ in entering:
        prompts[e["group"]] += counted[id(e)]
    num_tokens = sum(counted.values())
    num_prompts = sum(n > 0 for n in prompts.values())
    direct = correction is None

    def old(u):
        return u[2] if direct else u[1]

    total, by_logp, by_entropy = 0.0, defaultdict(float), defaultdict(float)
    for e, a in entering:
        for segment in e["segments"]:
            for t, (name, logp, recorded, entropy) in enumerate(segment):
                share = {
                    "token_mean": lambda: 1 / num_tokens,
                    "sequence_mean": lambda e=e: 1 / counted[id(e)] / len(entering),
                    "prompt_mean": lambda e=e: 1 / prompts[e["group"]] / num_prompts,
                    "constant_length": lambda: 1 / length / len(entering),
                }[aggregation]()
                c = 1.0 if direct else coefficient(correction, segment, t)
                value, slope = token_loss(loss, segment, t, a, old)
                d = log_ratio(logp, recorded)
                k3 = math.exp(d) - 1 - d
                inside = k3 <= 10
                total += c * share * value + kl * min(k3, 10) / num_tokens
                total -= bonus * entropy / num_tokens
                by_logp[name] += c * share * slope
                by_logp[name] += kl * (math.exp(d) - 1) / num_tokens if inside else 0.0
                by_entropy[name] -= bonus / num_tokens
    return total, dict(by_logp), dict(by_entropy)
