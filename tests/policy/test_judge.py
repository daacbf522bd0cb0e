"""`segrew judge` from the command line before a judge on this machine."""

import json
import threading

import pytest

from reward_models import SegmentRewardModel
from segrew.cli import main
from segrew.run_directory import read_json, read_jsonl

WORDS = ["zero", "one", "two", "three", "four", "five"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shown(body) -> dict[str, str]:
    """The two answers in a request."""
    text = body["messages"][0]["content"]
    return {side: text.split(f"<answer_{side}>\n")[1].split(f"\n</answer_{side}>")[0] for side in "AB"}


def longer_wins(body) -> str:
    answers = shown(body)
    a, b = len(answers["A"]), len(answers["B"])
    return f"Reasons.\nhelpfulness: {'tie' if a == b else 'A' if a > b else 'B'}"


@pytest.fixture
def files(tmp_path):
    """The model answers 0 and 1 at more length, 2 and 3 at less, 4 as long as the baseline; 5 has no counterpart."""
    lengths = [(9, 2), (8, 1), (1, 5), (2, 6), (3, 3)]
    model = [{"prompt": word, "response": "m" * m} for word, (m, _) in zip(WORDS, lengths, strict=False)]
    baseline = [{"instruction": word, "output": "b" * b} for word, (_, b) in zip(WORDS, lengths, strict=False)]
    model.append({"prompt": "five", "response": "alone"})
    (tmp_path / "baseline.json").write_text(json.dumps(baseline))
    return {"answers": write(tmp_path / "answers.jsonl", model), "baseline": tmp_path / "baseline.json"}


@pytest.fixture
def run(tmp_path, files):
    def judge(server, code=0, **flags):
        url = server if isinstance(server, str) else server.url
        settings = {"base_url": url, "judge_model": "j", "output_dir": tmp_path / "out"} | files | flags
        argv = ["judge"]
        for flag, value in settings.items():
            argv += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
        assert main(argv) == code
        return tmp_path / "out"

    return judge


def test_both_orders_are_asked_and_counted(run, stand_in, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret\n")
    server = stand_in(longer_wins)
    out = run(server, api_key_env="JUDGE_KEY")
    pairs = [tuple(shown(body).values()) for body in server.requests]
    assert len(pairs) == 10 and all((b, a) in pairs for a, b in pairs)
    results = read_json(out / "judge.json")
    row = results["dimensions"]["helpfulness"]
    assert [row[name]["count"] for name in ("win", "tie", "loss")] == [2, 1, 2] and row["win_rate"] == 0.5
    assert results["unmatched"] == {"answers": 1, "baseline": 0}
    assert results["characters"] == {"model": 4.6, "baseline": 3.4}
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    assert all("secret" not in path.read_text() for path in out.iterdir())


def test_a_judge_that_loves_the_first_place_gives_ties(run, stand_in):
    row = read_json(run(stand_in(lambda body: "helpfulness: A")) / "judge.json")["dimensions"]["helpfulness"]
    assert (row["tie"]["count"], row["first"], row["consistent"]) == (5, 1.0, 0.0)


def test_unreadable_replies_are_counted_apart(run, stand_in):
    def answer(body):
        answers = shown(body).values()
        if "m" * 9 in answers:
            return "I would rather not say."
        return (400, "filtered") if "m" * 8 in answers else longer_wins(body)

    out = run(stand_in(answer))
    row = read_json(out / "judge.json")["dimensions"]["helpfulness"]
    assert (row["unreadable"], row["n"], row["win"]["count"], row["loss"]["count"]) == (2, 3, 0, 2)
    assert {line.get("error") for line in read_jsonl(out / "judgments.jsonl")} == {None, "400 filtered"}


def test_several_dimensions_in_one_request(run, stand_in):
    server = stand_in(lambda body: longer_wins(body) + "\nfluency: tie")
    dimensions = read_json(run(server, dimensions=["helpfulness", "fluency"]) / "judge.json")["dimensions"]
    assert len(server.requests) == 10 and dimensions["fluency"]["tie"]["count"] == 5
    assert dimensions["helpfulness"]["win"]["count"] == 2


def test_a_broken_run_goes_on_where_it_stopped(run, stand_in, capsys):
    lock, left = threading.Lock(), [6]

    def dies_after_six(body):
        with lock:
            left[0] -= 1
            return longer_wins(body) if left[0] >= 0 else (503, "gone")

    broken = stand_in(dies_after_six)
    out = run(broken, code=2, workers=1, max_retries=1)
    assert "no answer after 2 tries, the last one: 503 gone" in capsys.readouterr().err
    assert len(read_jsonl(out / "judgments.jsonl")) == 6 and not (out / "judge.json").exists()
    with (out / "judgments.jsonl").open("a") as file:
        file.write('{"id": "half a li')  # a kill in the middle of a line
    broken.answer = longer_wins
    before = len(broken.requests)
    run(broken, workers=3)
    assert len(broken.requests) - before == 4
    assert len(read_jsonl(out / "judgments.jsonl")) == 10
    assert read_json(out / "judge.json")["dimensions"]["helpfulness"]["win"]["count"] == 2
    whole = (out / "judge.json").read_text()
    run(broken)
    assert len(broken.requests) - before == 4 and (out / "judge.json").read_text() == whole


def test_an_unreachable_judge_leaves_no_directory_and_destroys_none(run, stand_in, capsys):
    out = run("http://127.0.0.1:9/v1", code=2)
    assert "no connection" in capsys.readouterr().err and not out.exists()
    run(stand_in(longer_wins))
    before = (out / "judge.json").read_text()
    run("http://127.0.0.1:9/v1", code=2, overwrite_output_dir=True)
    assert (out / "judge.json").read_text() == before


@pytest.mark.parametrize("content", [None, "directory"])
def test_a_rubric_that_cannot_be_read_names_its_flag(run, tmp_path, capsys, content):
    path = tmp_path / "rubrics.yaml"
    if content:
        path.mkdir()
    run("http://127.0.0.1:9/v1", code=2, rubrics=path)
    assert f"--rubrics {path}: " in capsys.readouterr().err


@pytest.mark.parametrize("name, value", [("judge_model", "k"), ("temperature", 0.5), ("dimensions", ["overall"])])
def test_other_settings_do_not_go_on(run, stand_in, capsys, name, value):
    server = stand_in(longer_wins)
    run(server)
    out = run(server, code=2, **{name: value})
    said = " ".join(capsys.readouterr().err.split())
    assert f"was made with other settings ({name} " in said and f", now {value!r}" in said
    assert len(server.requests) == 10 and len(read_jsonl(out / "judgments.jsonl")) == 10


def test_changed_answers_do_not_go_on_but_may_start_anew(run, stand_in, files, capsys):
    server = stand_in(longer_wins)
    out = run(server)
    write(files["answers"], [{"prompt": "zero", "response": "other"}])
    run(server, code=2)
    assert "digests" in capsys.readouterr().err
    run(server, overwrite_output_dir=True)
    assert len(read_jsonl(out / "judgments.jsonl")) == 2


def test_requests_run_side_by_side(run, stand_in):
    barrier = threading.Barrier(2)

    def answer(body):
        barrier.wait(timeout=60)  # no one is answered alone
        return longer_wins(body)

    server = stand_in(answer)
    run(server, workers=2)
    assert server.most_together == 2


def test_a_judge_that_turns_everything_down_is_not_asked_for_ever(run, stand_in, capsys, monkeypatch):
    monkeypatch.setattr("policy.judge.TURNED_DOWN", 3)
    mended, asked = [], []

    def answer(body):
        asked.append(body)
        if mended:
            return longer_wins(body)
        threading.Event().wait(0.3 * (len(asked) > 3))  # meanwhile the three before are read
        return 400, "unsupported parameter: max_tokens"

    server = stand_in(answer)
    run(server, code=2, workers=1)
    assert "unsupported parameter: max_tokens" in capsys.readouterr().err and len(server.requests) < 10
    mended.append(True)  # and asked again, all of it, once it does not
    row = read_json(run(server) / "judge.json")["dimensions"]["helpfulness"]
    assert (row["n"], row["unreadable"]) == (5, 0)


def test_agreement_with_a_reward_model(run, stand_in, reward_dirs):
    out = run(stand_in(longer_wins), reward_model=reward_dirs["response"])
    model = SegmentRewardModel.from_pretrained(reward_dirs["response"])
    lengths = [(9, 2), (8, 1), (1, 5), (2, 6)]  # decided by length
    prompts = [[{"role": "user", "content": word}] for word in WORDS[:4]]
    ours = model.score(prompts, ["m" * m for m, _ in lengths])
    theirs = model.score(prompts, ["b" * b for _, b in lengths])
    agreed = [(a.score > b.score) == (m > n) for a, b, (m, n) in zip(ours, theirs, lengths, strict=True)]
    found = read_json(out / "judge.json")["agreement"]["helpfulness"]
    assert (found["n"], found["share"]) == (4, sum(agreed) / 4)


def test_mt_bench_answers_meet_turn_by_turn(run, stand_in, tmp_path):
    question = {"question_id": 7, "category": "writing", "turns": ["Write.", "Shorter."]}

    def answer(model, *turns):
        return {"question_id": 7, "model_id": model, "choices": [{"index": 0, "turns": list(turns)}]}

    flags = {
        "questions": write(tmp_path / "question.jsonl", [question]),
        "answers": write(tmp_path / "m.jsonl", [answer("m", "mm", "m")]),
        "baseline": write(tmp_path / "b.jsonl", [answer("b", "b", "bbbb")]),
    }
    server = stand_in(longer_wins)
    row = read_json(run(server, **flags) / "judge.json")["dimensions"]["helpfulness"]
    assert (row["win"]["count"], row["loss"]["count"]) == (1, 1)
    later = [body for body in server.requests if "Shorter." in body["messages"][0]["content"]]
    assert len(later) == 2 and all("[assistant]\nmm" in body["messages"][0]["content"] for body in later)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"judge_model": ""}, "--judge_model is missing"),
        ({"base_url": "localhost:8000"}, "must begin with http"),
        ({"base_url": ""}, "--base_url is missing"),
        ({"workers": 0}, "--workers 0"),
        ({"max_retries": -1}, "--max_retries -1"),
        ({"dimensions": ["beauty"]}, "--dimensions beauty: not in the rubric"),
        ({"rubrics": "nowhere.yaml"}, "nowhere.yaml"),
        ({"answers": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"reward_model": "nowhere"}, "no reward-model directory"),
        ({"questions": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
    ],
)
def test_bad_settings_are_one_line_and_write_nothing(run, stand_in, capsys, flags, message):
    server = stand_in(longer_wins)
    out = run(server, code=2, **flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not out.exists() and not server.requests


def test_files_with_nothing_in_common_are_refused(run, stand_in, tmp_path, capsys):
    other = write(tmp_path / "other.jsonl", [{"prompt": "else", "response": "x"}])
    out = run(stand_in(longer_wins), code=2, baseline=other)
    assert "no question in common" in capsys.readouterr().err and not out.exists()


def test_another_commands_run_is_left_alone(run, stand_in, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text('{"command": "score", "config": {}}')
    run(stand_in(longer_wins), code=2)
    assert "already holds a run" in capsys.readouterr().err
