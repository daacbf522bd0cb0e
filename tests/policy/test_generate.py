"""`segrew generate` from the command line, on models of a few thousand weights."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model

from policy.answer_files import read_replies
from policy.best_of import expected_best_of
from reward_models import SegmentRewardModel
from segrew.chat import ChatFormat
from segrew.cli import main
from segrew.language_models import load_causal_lm, load_tokenizer
from segrew.run_directory import read_json, read_jsonl
from segrew.segmentation import SegmentationConfig

CPU = torch.device("cpu")
BENCH = [
    {"question_id": 1, "category": "writing", "turns": ["Write a line.", "Shorter."]},
    {"question_id": 2, "category": "math", "turns": ["One and one?"]},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(policy_dir, prompts_file, tmp_path):
    """Run the command with flags and return the directory it wrote."""

    def generate(name="out", code=0, **flags):
        settings = {"model_name_or_path": policy_dir, "dataset_name": prompts_file, "max_new_tokens": 8}
        settings |= {"output_dir": tmp_path / name, "model_id": "tiny"} | flags
        argv = ["generate"]
        for flag, value in settings.items():
            argv += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
        assert main(argv) == code
        return tmp_path / name

    return generate


def test_greedy_answers_are_the_likeliest_tokens(run, policy_dir):
    """Against an argmax loop over the plain model; the policy's own generation settings ask for a penalty."""
    out = run(temperature=0)
    model = load_causal_lm(str(policy_dir), dtype=torch.float32, device=CPU)
    chat = ChatFormat.from_tokenizer(load_tokenizer(str(policy_dir)))
    for row in read_jsonl(out / "answers.jsonl"):
        ids = chat.prompt_ids(row["prompt"])
        start = len(ids)
        while len(ids) < start + 8 and ids[-1:] != [chat.stop_id]:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert row["response"] == chat.decode(ids[start:])
    (draw,) = read_json(out / "metadata.json")["draws"]
    assert draw["sampling"][0]["do_sample"] is False and draw["sampling"][0]["temperature"] == 0


def test_one_seed_gives_the_same_answers_and_another_others(run):
    first, again, other = (run(name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    texts = [[row["response"] for row in read_jsonl(out / "answers.jsonl")] for out in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]


def test_mt_bench_goes_on_from_its_first_answers_at_the_categorys_temperature(run, tmp_path):
    out = run(format="mt_bench", dataset_name=write(tmp_path / "question.jsonl", BENCH))
    rows = read_jsonl(out / "model_answer" / "tiny.jsonl")
    assert [len(row["choices"][0]["turns"]) for row in rows] == [2, 1]
    (draw,) = read_json(out / "metadata.json")["draws"]
    assert [entry["temperature"] for entry in draw["sampling"]] == [0, 0.7]
    assert draw["answers"] == 3


def test_the_best_of_n_is_kept_and_every_sample_scored_on_its_own_tokens(run, reward_dirs, tmp_path):
    question = {"question_id": 1, "category": "writing", "turns": ["Write.", "Shorter."]}
    file = write(tmp_path / "question.jsonl", [question])
    out = run(format="mt_bench", dataset_name=file, reward_model=reward_dirs["entropy"], best_of=[3], seed=5)
    rows = read_jsonl(out / "scores.jsonl")
    assert [(row["id"], row["sample"]) for row in rows] == [(f"1/{turn}", k) for turn in (1, 2) for k in range(3)]
    (answer,) = read_jsonl(out / "model_answer" / "tiny.jsonl")
    best = [max(rows[i : i + 3], key=lambda row: row["score"]) for i in (0, 3)]
    assert best[0]["sample"] > 0, "another seed would tell the best from the first"
    assert answer["choices"][0]["turns"] == [row["response"] for row in best]
    assert rows[3]["prompt"][1] == {"role": "assistant", "content": best[0]["response"]}
    assert read_json(out / "metadata.json")["scored_on"] == "tokens"
    for row in rows:  # random bytes decode to marks, so only the drawn tokens have this length
        tokens = sum(segment["tokens"] for segment in row["segments"])
        assert tokens == 8 or (row["ended"] and tokens < 8)


def test_a_sweep_draws_once_a_temperature(run, reward_dirs):
    out = run(reward_model=reward_dirs["response"], temperatures=[0.7, 1.2], best_of=[1, 2, 4], format="jsonl")
    sweep = read_json(out / "best_of.json")
    assert [(row["temperature"], row["best_of"]) for row in sweep] == [(t, n) for t in (0.7, 1.2) for n in (1, 2, 4)]
    for temperature in ("0.7", "1.2"):
        rows = read_jsonl(out / f"t{temperature}" / "scores.jsonl")
        assert len(rows) == 5 * 4 and {row["temperature"] for row in rows} == {float(temperature)}
        for row in (row for row in sweep if row["temperature"] == float(temperature)):
            per_prompt = [[r["score"] for r in rows[i : i + 4]] for i in range(0, 20, 4)]
            expected = sum(expected_best_of(scores, row["best_of"]) for scores in per_prompt) / 5
            assert row["score"] == pytest.approx(expected)
        answers = read_jsonl(out / f"t{temperature}" / "answers.jsonl")
        assert [row["response"] for row in answers] == [
            max(rows[i : i + 4], key=lambda row: row["score"])["response"] for i in range(0, 20, 4)
        ]
        assert {row["model"] for row in answers} == {f"tiny-t{temperature}"}
        assert (out / f"t{temperature}" / "sft.jsonl").exists()
    assert (out / "best_of.svg").exists()


def test_a_policy_compared_with_itself_gains_nothing(run, reward_dirs):
    first = run("before", reward_model=reward_dirs["response"], seed=3)
    out = run("after", reward_model=reward_dirs["response"], seed=3, compare_to=first)
    record = read_json(out / "comparison.json")
    assert record["prompts"] == 5 and all(row["gain"] == pytest.approx(0, abs=1e-6) for row in record["groups"])


def test_an_adapter_answers_as_its_merged_model(run, policy_dir, tmp_path):
    torch.manual_seed(0)
    model = load_causal_lm(str(policy_dir), dtype=torch.float32, device=CPU)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    load_tokenizer(str(policy_dir)).save_pretrained(tmp_path / "merged")
    outs = {name: run(name, temperature=0, model_name_or_path=tmp_path / source) for name, source in
            (("one", "adapter"), ("two", "merged"))}  # fmt: skip
    plain = run("three", temperature=0)
    texts = [[row["response"] for row in read_jsonl(out / "answers.jsonl")] for out in (*outs.values(), plain)]
    assert texts[0] == texts[1] != texts[2]


def test_a_reward_model_with_another_tokenizer_reads_the_text(run, policy_dir, build_tokenizer, build_reward_model,
                                                               tmp_path):  # fmt: skip
    other = tmp_path / "other"
    load_causal_lm(str(policy_dir), dtype=torch.float32, device=CPU).save_pretrained(other)
    build_tokenizer(("a", "b")).save_pretrained(other)
    scorer = build_reward_model(tmp_path / "rm", other, SegmentationConfig(rule="response"))
    out = run(reward_model=scorer)
    assert read_json(out / "metadata.json")["scored_on"] == "text"
    row = read_jsonl(out / "scores.jsonl")[0]
    (again,) = SegmentRewardModel.from_pretrained(scorer, device=CPU).score([row["prompt"]], [row["response"]])
    assert again.score == pytest.approx(row["score"], abs=1e-5)


def test_what_is_written_can_be_judged(run):
    replies = read_replies(str(run() / "answers.jsonl"), {})
    assert len(replies) == 5


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"best_of": 0}, "--best_of [0]: each N must be at least 1"),
        ({"best_of": 2}, "--best_of needs scores"),
        ({"compare_to": "x"}, "--compare_to needs scores"),
        ({"temperature": -1}, "--temperatures -1.0: must be positive"),
        ({"temperatures": "nan"}, "--temperatures nan"),
        ({"max_new_tokens": 0}, "--max_new_tokens 0"),
        ({"max_new_tokens": 600}, "the model's context has 512"),
        ({"stop_token_ids": 259}, "--stop_token_ids [259]: the tokenizer has the ids 0 to 258"),
        ({"format": "alpaca_eval"}, "line 1: --format alpaca_eval needs questions with 'instruction'"),
        ({"format": "csv"}, "--format"),
        ({"model_id": "../x"}, "--model_id ../x"),
        ({"reward_model": "nowhere"}, "no reward-model directory"),
        ({"dataset_name": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"max_rows": 0}, "--max_rows 0"),
    ],
)
def test_bad_settings_are_one_line_and_write_nothing(run, capsys, flags, message):
    out = run(code=2, **flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not out.exists()


def test_n_equal_answers_and_unknown_categories_are_refused(run, capsys, reward_dirs, tmp_path):
    run(code=2, temperature=0, best_of=2, reward_model=reward_dirs["response"])
    assert "all N answers are the same; pass positive --temperatures" in capsys.readouterr().err
    file = write(tmp_path / "question.jsonl", [BENCH[0] | {"category": "poetry"}])
    run(code=2, format="mt_bench", dataset_name=file)
    assert "no temperature for category 'poetry'; pass --temperatures" in capsys.readouterr().err
    assert run(format="mt_bench", dataset_name=file, temperature=0.5).is_dir()


def test_another_run_is_not_overwritten_nor_lost_before_there_are_answers(run, capsys):
    out = run()
    before = (out / "answers.jsonl").read_text()
    run(code=2, seed=5)
    assert "already holds a run" in capsys.readouterr().err
    run(code=2, seed=5, overwrite_output_dir=True, max_new_tokens=600)
    assert (out / "answers.jsonl").read_text() == before
    run(seed=5, overwrite_output_dir=True)
    assert (out / "answers.jsonl").read_text() != before
