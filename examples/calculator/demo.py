"""`make demo`: trains the calculator policy on the four services, and says what came of it.

FROM_SCRATCH=1 makes the warm start anew first; RESUME=1 goes on with a run that was interrupted.
OVERLAY=redis-nats-ray lays recipes/overlays/redis-nats-ray.yaml over the recipe. AGENT=chat trains
the agent of chat.py, which talks to the policy over HTTP.
Prints one JSON object a measure, and exits with 1 where one does not hold.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from transcripts import Transcript, read_transcripts

from treadle_cli.rows import written
from treadle_runtime.files import LockHeldError, hold_lock
from treadle_runtime.measures import NONE, Measure, report

ROOT = Path(__file__).resolve().parents[2]
RUN = Path("runs/demo")
POLICY = Path("examples/calculator/policy")
MADE_ANEW = Path("runs/demo-policy")
AGENTS = {
    "env": "examples/calculator/env.py:CalculatorEnv",
    "chat": "examples/calculator/chat.py:CalculatorChat",
}
SFT_RECIPE, RL_RECIPE = "recipes/calculator-sft.yaml", "recipes/calculator.yaml"

HONESTLY = """
What this shows. The policy was taught by an expert who is always right, and who answers in the
head six times out of ten where a call is due. It learned to copy the calls; it cannot add in its
head, so it guessed there. RL saw only whether the last answer was right. It made the policy call,
as often as there are operators, and copy with fewer slips.

What it does not show. RL did not invent the use of the tool: full chains of calls were among the
demonstrations, though rare. Chains longer than those trained do not follow. The scores are those
of 256 sums that neither the demonstrations nor RL ever held, the same before and after.
"""


def main() -> int:
    began = float(os.environ.get("TREADLE_DEMO_START") or time.time())
    os.chdir(ROOT)  # the recipes' paths are relative to it
    from_scratch, resume = os.environ.get("FROM_SCRATCH"), os.environ.get("RESUME")
    policy = MADE_ANEW if from_scratch else POLICY
    if not resume:
        try:
            remove(RUN)
        except LockHeldError as error:
            sys.stderr.write(f"an earlier demo still runs: {error}\n")
            return 1
        if from_scratch and (status := treadle("sft", SFT_RECIPE, f"output={policy}")):
            return status
    words = [f"rollout.agent.name={AGENTS[os.environ.get('AGENT') or 'env']}"]
    if overlay := os.environ.get("OVERLAY"):
        words += ["--overlay", f"recipes/overlays/{overlay}.yaml"]
    if status := treadle("train", RL_RECIPE, f"run.dir={RUN}", f"run.model={policy}", *words):
        return status
    show()
    return report(measure(began))


def remove(run: Path) -> None:
    """Removes the run directory of an earlier demo; raises LockHeldError where it still runs."""
    os.close(hold_lock(run / "lock"))
    shutil.rmtree(run)


def treadle(*words: str) -> int:
    """Runs the command; Ctrl-C is for it to handle. Returns its exit status."""
    print(f"$ treadle {' '.join(words)}", flush=True)
    process = subprocess.Popen([sys.executable, "-m", "treadle_cli.main", *words])  # noqa: S603
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


def show() -> None:
    """Prints the same held-out tasks before and after RL, and what RL did."""
    greedy = read_transcripts(RUN, "greedy")
    before, after = greedy[min(greedy)], greedy[max(greedy)]
    print("\nHeld-out sums, answered greedily:\n")
    pairs = chosen(before, after)
    width = max(len(each.said) for pair in pairs for each in pair)
    for old, new in pairs:
        print(f"  before  {old.expression:<12} {old.said:<{width}}  {verdict(old)}")
        print(f"  after   {new.expression:<12} {new.said:<{width}}  {verdict(new)}\n")
    sampled = read_transcripts(RUN, "sampled")
    print("Held-out sums that come out right when sampled, by the calls that they need:\n")
    for name, step in (("before", min(sampled)), ("after", max(sampled))):
        shares = (f"{calls}: {share:.2f}" for calls, share in by_operations(sampled[step]))
        print(f"  {name:<7} {'   '.join(shares)}")
    print(HONESTLY)


def chosen(
    before: Sequence[Transcript], after: Sequence[Transcript]
) -> list[tuple[Transcript, Transcript]]:
    """The first pair of the set for each number of calls needed, and the first other one wrong."""
    pairs = list(zip(before, after, strict=True))
    firsts = {new.operations: (old, new) for old, new in reversed(pairs)}
    shown = [firsts[operations] for operations in sorted(firsts)]
    return shown + [pair for pair in pairs if not pair[1].right and pair not in shown][:1]


def by_operations(transcripts: Sequence[Transcript]) -> Iterator[tuple[int, float]]:
    """Share that is right, by calls needed."""
    for operations in sorted({each.operations for each in transcripts}):
        members = [each.right for each in transcripts if each.operations == operations]
        yield operations, sum(members) / len(members)


def verdict(transcript: Transcript) -> str:
    return "right" if transcript.right else "wrong"


def measure(began: float) -> Iterator[Measure]:
    """The demo's measures, from the rows that experience and trainer wrote."""
    scores = {
        (row["evaluation"], row["step"]): row["score"]
        for row in written(RUN, "experience", "evaluation")
    }
    steps = written(RUN, "trainer", "step")
    last = max(step for _, step in scores)
    for name, before, after in (("greedy", "< 0.1", ">= 0.93"), ("sampled", NONE, ">= 0.85")):
        yield Measure(f"heldout_{name}_before", scores[name, 0], "share", before)
        yield Measure(f"heldout_{name}_after", scores[name, last], "share", after)
    # The wait of the first step begins with its claim, and spans the scoring of the baseline.
    first = steps[0]
    claimed = first["time"] - first["publish_s"] - first["train_s"] - first["wait_s"]
    yield Measure("rl_seconds", steps[-1]["time"] - claimed, "s", "<= 90")
    yield Measure("total_seconds", time.time() - began, "s", "<= 480")


if __name__ == "__main__":
    raise SystemExit(main())
