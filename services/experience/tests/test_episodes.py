"""`treadle episodes`: it lists what was asked for, and shows what was said."""

import hashlib
import json

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from treadle_core.episodes import NO_VERSION, Segment
from treadle_core.media import Medium, MediumSpan
from treadle_experience import episodes
from treadle_experience.adapters.sqlite import FILE_NAME, SqliteLedger
from treadle_experience.transcripts import Words, before_and_after, pieces
from treadle_payloads.codec import encode_payload

WORDS = {"ask": 0, "call": 1, "seen": 2, "answer": 3}
SAMPLED = np.array([False, True, False, True])


def payload(version: int) -> bytes:
    versions = np.where(SAMPLED, version, NO_VERSION).astype(np.int32)
    segment = Segment(
        token_ids=np.arange(4, dtype=np.int32),
        sampled=SAMPLED,
        trained=SAMPLED,
        logprobs=np.where(SAMPLED, -0.5, 0).astype(np.float32),
        policy_version=versions,
        context_version=versions,
    )
    return encode_payload([segment])


def play(world, ticket, version: int, **changes) -> None:
    data = payload(version)
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    world.complete(ticket, payload=data, versions=[version], traceparent=trace, **changes)


@pytest.fixture
def run(make_world, tools, tmp_path):
    """Steps 1 to 3, each in a checkpoint; step 1 is released; an evaluation at steps 0 and 2."""
    world = make_world(evaluation=tools.evaluation(), max_lag=0).start()
    version = 1
    for step in (1, 2, 3):
        while tickets := world.lease(version):
            for number, ticket in enumerate(tickets):
                play(world, ticket, version, reward=float(number % 2))
        world.claim(step)
        world.report(step)
        version = world.publish(step)
        world.checkpoint(step)
    for ticket in world.lease(version)[1:]:
        play(world, ticket, version, reward=None)
    ledger = SqliteLedger(tmp_path / FILE_NAME)
    ledger.append(world.save(), ledger.acquire("run"))
    ledger.close()
    return tmp_path


@pytest.fixture
def tokenizer(run):
    """The run's model folder, named by its run.json."""
    text = Tokenizer(WordLevel(WORDS, unk_token="ask")).to_str()  # noqa: S106
    (run / "model").mkdir()
    (run / "model" / "tokenizer.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    record = {
        "recipe": {"run": {"model": str(run / "model")}},
        "model": {"tokenizer.json": digest},
    }
    (run / "run.json").write_text(json.dumps(record))
    return run / "model" / "tokenizer.json"


@pytest.fixture
def listed(run, capsys):
    def ask(*words: str) -> list[dict]:
        assert episodes.main([str(run), "--limit", "0", "--json", *words]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return ask


def test_all_episodes_are_listed_with_what_became_of_them(listed) -> None:
    rows = listed()

    assert {row["state"] for row in rows} >= {"consumed", "scored", "issued"}
    consumed = [row for row in rows if row["state"] == "consumed"]
    assert sorted({row["step"] for row in consumed}) == [1, 2, 3]
    assert all(row["trace_id"] == "ab" * 16 for row in consumed)
    assert all("reward" not in row for row in rows if row["state"] == "issued")


@pytest.mark.parametrize(
    ("words", "holds"),
    [
        pytest.param(["--step", "2..3"], lambda row: 2 <= row["step"] <= 3, id="steps"),
        pytest.param(["--step", "2"], lambda row: row["step"] == 2, id="step"),
        pytest.param(["--reward", "0.5.."], lambda row: row["reward"] == 1, id="reward-from"),
        pytest.param(["--reward", "..0.5"], lambda row: row["reward"] == 0, id="reward-to"),
        pytest.param(["--state", "scored"], lambda row: row["evaluation"] == "greedy", id="task"),
        pytest.param(["--state", "issued"], lambda row: "tokens" not in row, id="episode"),
        pytest.param(["--evaluation", ""], lambda row: row["evaluation"] == "", id="training"),
        pytest.param(["--version", "2"], lambda row: row["versions"] == [2], id="version"),
        pytest.param(["--task", "t000001"], lambda row: row["task"] == "t000001", id="task-id"),
        pytest.param(["--termination", "finished"], lambda row: "reward" in row or 1, id="ended"),
    ],
)
def test_a_filter_leaves_only_what_it_names(listed, words, holds) -> None:
    rows = listed(*words)

    assert rows
    assert all(holds(row) for row in rows)


def test_the_newest_are_listed_and_how_many_there_are(run, capsys) -> None:
    assert episodes.main([str(run), "--limit", "2"]) == 0

    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 3
    assert "the newest 2 of" in said.err


def test_an_episode_is_shown_turn_by_turn(run, tokenizer, listed, capsys) -> None:
    chosen = listed("--step", "3", "--evaluation", "")[0]["episode"]

    assert episodes.main([str(run), chosen[:20]]) == 0

    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["prompt", "ask"] in lines
    assert ["policy", "v3", "call"] in lines
    assert ["observation", "seen"] in lines
    assert ["policy", "v3", "answer"] in lines
    assert "training, step 3  consumed" in out


def test_tokens_are_shown_with_log_probability_and_version(run, tokenizer, listed) -> None:
    chosen = listed("--step", "3")[0]["episode"]

    (shown,) = listed(chosen, "--tokens")

    first, second = shown["token_rows"][:2]
    assert first == {"segment": 0, "place": 0, "id": 0, "text": "ask", "trained": False}
    assert (second["text"], second["logprob"], second["version"]) == ("call", -0.5, 3)
    assert second["trained"] is True


def test_ids_stand_for_text_where_there_is_no_tokenizer(run, listed, capsys) -> None:
    chosen = listed("--step", "3")[0]["episode"]

    assert episodes.main([str(run), chosen, "--tokens"]) == 0

    assert "neither run.model nor a checkpoint has the tokenizer.json" in capsys.readouterr().out


def test_a_tokenizer_other_than_the_run_began_with_is_not_used(run, tokenizer, listed) -> None:
    tokenizer.write_text(tokenizer.read_text() + " ")

    (shown,) = listed(listed("--step", "3")[0]["episode"])

    assert [piece["text"] for piece in shown["pieces"]] == ["0", "1", "2", "3"]


def test_a_checkpoint_has_the_tokenizer_when_the_model_folder_is_gone(run, tokenizer, listed):
    kept = run / "checkpoints" / "step-000003"
    kept.mkdir(parents=True)
    tokenizer.rename(kept / "tokenizer.json")

    (shown,) = listed(listed("--step", "3")[0]["episode"])

    assert shown["pieces"][1] == {"role": "policy", "text": "call", "versions": [3]}


def test_a_released_payload_is_said_to_be_with_the_checkpoint(run, listed) -> None:
    (shown,) = listed(listed("--step", "1", "--evaluation", "")[0]["episode"])

    assert "released when the checkpoint of step 2 (checkpoints/" in shown["missing"]
    assert shown["pieces"] == []


def test_an_episode_without_a_result_has_no_tokens_yet(run, listed) -> None:
    (shown,) = listed(listed("--state", "issued")[0]["episode"])

    assert shown["missing"].endswith("is not there: it is issued")


@pytest.mark.parametrize("name", ["zzz", "0123456789abcdefz"])
def test_a_name_that_fits_no_episode_is_refused(run, capsys, name) -> None:
    assert episodes.main([str(run), name]) == episodes.UNKNOWN
    assert f"no episode whose id begins with {name}" in capsys.readouterr().err


def test_a_directory_without_a_run_is_unreadable(tmp_path, capsys) -> None:
    assert episodes.main([str(tmp_path)]) == episodes.UNREADABLE


def test_a_range_that_is_none_is_refused_by_name(run, capsys) -> None:
    with pytest.raises(SystemExit):
        episodes.main([str(run), "--step", "first"])

    assert "invalid range, as 7, 7..9, 7.. or ..9 value: 'first'" in capsys.readouterr().err


def test_the_same_tasks_are_told_before_and_after(run, tokenizer) -> None:
    pairs = before_and_after(run, "greedy")

    assert [pair["task"] for pair in pairs] == [{"held_out": n} for n in range(3)]
    assert [(pair["before"]["step"], pair["after"]["step"]) for pair in pairs] == [(0, 2)] * 3
    assert pairs[0]["after"]["pieces"][1] == {"role": "policy", "text": "call", "versions": [3]}
    assert before_and_after(run, "unknown") == []


@pytest.mark.parametrize(
    ("size", "note"),
    [(12_345, "<image 12 KB png>"), (999, "<image 999 B png>")],
    ids=["kilobytes", "bytes"],
)
def test_an_image_is_a_note_in_the_text_where_it_was_shown(size: int, note: str, tokenizer) -> None:
    medium = Medium("a" * 64, size, "image/png")
    segment = Segment(
        token_ids=np.array([0, 2, 2, 0, 3], np.int32),
        sampled=(sampled := np.arange(5) == 4),
        trained=sampled,
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        policy_version=(versions := np.where(sampled, 1, NO_VERSION).astype(np.int32)),
        context_version=versions,
        media=(MediumSpan(medium.sha256, 1, 2),),
    )

    said = [each.text for each in pieces([segment], Words(tokenizer), [medium])]
    as_ids = [each.text for each in pieces([segment], Words(None), [medium])]
    unknown = [each.text for each in pieces([segment], Words(None))]

    assert said == [f"ask{note}ask", "answer"]
    assert as_ids == [f"0 {note} 0", "3"]
    assert unknown == ["0 <image> 0", "3"]


def test_how_many_media_an_episode_has_is_listed_and_shown(make_world, tmp_path, capsys) -> None:
    world = make_world().start()
    play(world, world.lease(1, 1)[0], 1, media=(Medium.of(b"image", "image/png"),))
    ledger = SqliteLedger(tmp_path / FILE_NAME)
    ledger.append(world.save(), ledger.acquire("run"))
    ledger.close()

    episodes.main([str(tmp_path), "--state", "done", "--json"])
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    episodes.main([str(tmp_path), row["episode"]])

    assert row["media"] == 1
    assert "media     1, 5 bytes" in capsys.readouterr().out
