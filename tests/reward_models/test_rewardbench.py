"""The benchmark command: the documented files, and figures recomputed from scores row by row."""

import io
import json
import shutil

import pytest
import torch
from rich.console import Console

import reward_models.rewardbench as rewardbench
from reward_models import SegmentRewardModel, rewardbench_scores
from reward_models.rewardbench import BenchmarkConfig, run_benchmark
from segrew import language_models, segmenter
from segrew.cli import main
from segrew.metrics import wilson_interval
from segrew.run_directory import read_json, read_jsonl

SUBSETS = ["alpacaeval-easy", "math-prm", "hep-python", "refusals-offensive"]


@pytest.fixture(scope="module")
def head_dir(head_dir, tmp_path_factory):
    """A copy: benchmarks leave their results in the directory."""
    return shutil.copytree(head_dir, tmp_path_factory.mktemp("benched") / "rm")


@pytest.fixture(scope="module")
def rows(short_pairs):
    """Twelve pairs in RewardBench v1's format, one of them with equal answers."""
    rows = [
        {"id": i, "prompt": p.prompt[-1]["content"], "chosen": p.chosen, "rejected": p.rejected}
        | {"subset": SUBSETS[i % 4], "chosen_model": "a", "rejected_model": "b"}
        for i, p in enumerate(short_pairs)
    ]
    return [*rows[:-1], rows[-1] | {"rejected": rows[-1]["chosen"]}]


@pytest.fixture(scope="module")
def bench_file(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def result(tmp_path_factory, head_dir, bench_file):
    out = tmp_path_factory.mktemp("out") / "run"
    config = BenchmarkConfig(
        reward_model=str(head_dir), dataset_name=str(bench_file), output_dir=str(out), subset_label="rebuilt"
    )
    return run_benchmark(config), out


def test_results_have_the_documented_shape(result):
    record, out = result
    assert read_json(out / "results.json") == record
    assert {"benchmark", "subsets", "sections", "overall", "missing", "settings"} <= set(record)
    assert record["benchmark"] == "rewardbench" and set(record["subsets"]) == set(SUBSETS)
    assert all({"accuracy", "n", "ties", "ci95"} <= set(entry) for entry in record["subsets"].values())
    assert all({"accuracy", "n"} <= set(entry) for entry in record["sections"].values())
    settings = record["settings"]
    assert settings["subset_label"] == "rebuilt" and settings["rule"].startswith("entropy>")
    assert set(record["length_baseline"]["subsets"]) == set(SUBSETS)


def test_figures_are_those_of_scores_row_by_row(result, rows, head_dir):
    record, out = result
    model = SegmentRewardModel.from_pretrained(head_dir)
    stored = read_jsonl(out / "scores.jsonl")
    assert [row["id"] for row in stored] == [str(row["id"]) for row in rows]
    wins, longer, ties = ({name: 0 for name in SUBSETS} for _ in range(3))
    for row, kept in zip(rows, stored, strict=True):
        prompt = [{"role": "user", "content": row["prompt"]}]
        chosen, rejected = (r.score for r in model.score([prompt] * 2, [row["chosen"], row["rejected"]]))
        assert kept["score_chosen"] == pytest.approx(chosen, abs=1e-4)
        assert kept["score_rejected"] == pytest.approx(rejected, abs=1e-4)
        wins[row["subset"]] += chosen > rejected
        ties[row["subset"]] += row["chosen"] == row["rejected"]
        longer[row["subset"]] += len(row["chosen"]) > len(row["rejected"])
    for name, entry in record["subsets"].items():
        assert entry["accuracy"] == pytest.approx(wins[name] / 3) and entry["n"] == 3 and entry["ties"] == ties[name]
        assert entry["ci95"] == pytest.approx(wilson_interval(wins[name], 3))
        assert record["length_baseline"]["subsets"][name]["accuracy"] == pytest.approx(longer[name] / 3)


def test_pairs_without_subsets_have_one_accuracy(tmp_path, head_dir, pairs_file, capsys):
    argv = ["rewardbench", "--reward_model", str(head_dir), "--dataset_name", str(pairs_file)]
    assert main([*argv, "--output_dir", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert "rows without a 'subset'" in error and "--benchmark pairs" in error and not (tmp_path / "a").exists()
    assert main([*argv, "--output_dir", str(tmp_path / "b"), "--benchmark", "pairs"]) == 0
    record = read_json(tmp_path / "b" / "results.json")
    scores = read_jsonl(tmp_path / "b" / "scores.jsonl")
    accuracy = sum(row["score_chosen"] > row["score_rejected"] for row in scores) / len(scores)
    assert record["overall"] == pytest.approx(accuracy) == record["subsets"]["all"]["accuracy"]
    assert record["subsets"]["all"]["n"] == 12 and record["missing"] == []


def test_pairs_of_identical_answers_are_left_out_and_counted(bench, rows, tmp_path):
    record, _, said = bench(benchmark="pairs", dataset_name=write(tmp_path / "pairs.jsonl", rows))
    assert record["pooled"]["n"] == 11 and record["ties"] == 0 and "1 left out: identical answers" in said


def test_the_first_rows_of_each_subset_are_enough_for_a_look(tmp_path, head_dir, bench_file):
    config = BenchmarkConfig(
        reward_model=str(head_dir), dataset_name=str(bench_file), output_dir=str(tmp_path / "a"), max_per_subset=2
    )
    assert [entry["n"] for entry in run_benchmark(config)["subsets"].values()] == [2, 2, 2, 2]


def test_dtype_is_that_of_the_trunk_and_part_of_the_settings(bench, head_dir):
    as_stored, _, _ = bench("stored")
    assert as_stored["settings"]["dtype"] == "float32"
    half, out, _ = bench("half", dtype="bfloat16")
    assert half["settings"]["dtype"] == "bfloat16" and len(read_jsonl(out / "scores.jsonl")) == 12
    with pytest.raises(ValueError, match="dtype 'bfloat16', now 'float32'"):
        bench("half")


def test_a_given_dtype_reaches_the_frozen_trunk_that_is_read_in_bfloat16_by_default(bench, head_dir, monkeypatch):
    exact, exact_out, _ = bench("exact")
    monkeypatch.setattr(language_models, "best_dtype", lambda device: torch.bfloat16)
    default, half_out, _ = bench("default")
    given, given_out, _ = bench("given", dtype="float32")
    dtypes = [record["settings"]["dtype"] for record in (exact, default, given)]
    assert dtypes == ["float32", "bfloat16", "float32"]
    scores = [[row["scores"] for row in read_jsonl(out / "scores.jsonl")] for out in (exact_out, half_out, given_out)]
    assert scores[2] == scores[0] != scores[1]
    segmenters = [
        SegmentRewardModel.from_pretrained(head_dir, dtype=dtype).segmenter() for dtype in (None, torch.float32)
    ]
    assert [next(model.parameters()).dtype for model in segmenters] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("rule", ["response", "token"])
def test_a_frozen_trunk_of_any_rule_can_be_benchmarked(tmp_path, train, bench, pairs_file, rule):
    train(tmp_path / "rm", tune="head", rule=rule)
    record, _, _ = bench(reward_model=str(tmp_path / "rm"), dataset_name=str(pairs_file), benchmark="pairs")
    assert record["subsets"]["all"]["n"] == 12


def test_pairs_that_training_has_read_are_benchmarked_without_a_pass(tmp_path, train, bench, pairs_file, monkeypatch):
    """Their states are in the feature cache, whatever head was fitted on them."""
    train(tmp_path / "rm", tune="head", head_penalty=3.0)
    passes, run = [], segmenter.response_states
    monkeypatch.setattr(segmenter, "response_states", lambda m, rows: passes.append(len(rows)) or run(m, rows))
    of_the_model = []
    monkeypatch.setattr(SegmentRewardModel, "outputs", lambda self, rows: of_the_model.append(len(rows)))
    record, _, _ = bench(reward_model=str(tmp_path / "rm"), dataset_name=str(pairs_file), benchmark="pairs")
    assert record["subsets"]["all"]["n"] == 12
    assert not passes and not of_the_model


# the run: resuming, batch sizes, comparing, other files


@pytest.fixture
def bench(head_dir, bench_file, tmp_path):
    """Run a benchmark on the short rows; returns its record, its directory and what it printed."""

    def run(name="run", **options):
        out = tmp_path / name
        defaults = {"reward_model": str(head_dir), "dataset_name": str(bench_file), "output_dir": str(out)}
        console = Console(width=200, file=io.StringIO())
        record = run_benchmark(BenchmarkConfig(**defaults | options), console)
        return record, out, console.file.getvalue()

    return run


def test_a_stopped_run_goes_on_where_it_was_and_comes_to_the_same(bench, monkeypatch):
    whole, out, _ = bench("whole")
    half = out.parent / "half"
    shutil.copytree(out, half)
    lines = (out / "scores.jsonl").read_text().splitlines(keepends=True)
    (half / "scores.jsonl").write_text("".join(lines[:5]) + lines[5][:20])  # killed in the middle of a line
    (half / "results.json").unlink()
    scored = []
    measure = rewardbench.BENCHMARKS["rewardbench"].measure

    def counted(model, bandit):
        return lambda items, size: [
            scored.append(item.id) or row for item in items for row in measure(model, bandit)([item], size)
        ]

    monkeypatch.setitem(
        rewardbench.BENCHMARKS, "rewardbench", rewardbench.BENCHMARKS["rewardbench"]._replace(measure=counted)
    )
    resumed, _, said = bench("half")
    assert len(scored) == 7 and "5 of 12 rows were scored before" in said
    assert resumed["subsets"] == whole["subsets"] and resumed["overall"] == whole["overall"]
    assert [row["id"] for row in read_jsonl(half / "scores.jsonl")] == [
        row["id"] for row in read_jsonl(out / "scores.jsonl")
    ]
    assert bench("half", subset_label="again")[0]["overall"] == whole["overall"] and len(scored) == 7


def test_other_settings_are_refused_in_a_directory_with_scores(bench, head_dir, tmp_path):
    _, out, _ = bench()
    before = (out / "scores.jsonl").read_text()
    with pytest.raises(ValueError, match=r"other settings \(max_per_subset None, now 1; rows .*overwrite_output_dir"):
        bench(max_per_subset=1)
    other = shutil.copytree(head_dir, tmp_path / "other")
    model = SegmentRewardModel.from_pretrained(other)
    with torch.no_grad():
        model.head.weight.mul_(2)
    model.save_pretrained(other)
    with pytest.raises(ValueError, match=r"weights '.*now '"):
        bench(reward_model=str(other))
    assert (out / "scores.jsonl").read_text() == before
    assert bench(max_per_subset=1, overwrite_output_dir=True)[0]["pooled"]["n"] == 4


@pytest.mark.parametrize(
    "change", [{"subset": "donotanswer"}, {"id": 99}, {"chat_template_kwargs": {"enable_thinking": False}}]
)
def test_rows_that_are_read_in_another_way_are_not_those_scored_before(bench, rows, tmp_path, change):
    bench()
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row | (change if i == 0 else {})) + "\n" for i, row in enumerate(rows)))
    with pytest.raises(ValueError, match=r"other settings .*rows"):
        bench(dataset_name=str(other))


def test_a_card_that_reads_units_in_another_way_is_not_what_scored_before(bench, head_dir, tmp_path):
    other = shutil.copytree(head_dir, tmp_path / "other")
    bench(reward_model=str(other))
    for key, value in (("temperature", 2.0), ("threshold", None)):
        card = json.loads((head_dir / "segrew.json").read_text())
        if key == "threshold":  # of another seventh digit: its label is the same
            card["segmentation"]["threshold"] *= 1 + 1e-9
        else:
            card[key] = value
        (other / "segrew.json").write_text(json.dumps(card))
        with pytest.raises(ValueError, match=r"other settings .*(temperature|fingerprint)"):
            bench(reward_model=str(other))


def test_every_batch_size_gives_the_same_scores(bench):
    one, many = (read_jsonl(bench(str(n), max_tokens_per_batch=n)[1] / "scores.jsonl") for n in (1, 4096))
    for a, b in zip(one, many, strict=True):
        assert a["scores"] == pytest.approx(b["scores"], abs=1e-5) and a["units"] == b["units"]


def test_scores_alone_give_the_results_back(bench):
    record, out, _ = bench()
    again = rewardbench_scores(read_jsonl(out / "scores.jsonl"))
    assert again["subsets"] == record["subsets"] and again["overall"] == record["overall"]


def test_length_and_truncation_are_reported(bench, rows, head_dir):
    record, out, said = bench()
    model = SegmentRewardModel.from_pretrained(head_dir)
    scores = [s for row in read_jsonl(out / "scores.jsonl") for s in row["scores"]]
    lengths = [float(len(model.chat.response_ids(row[side]))) for row in rows for side in ("chosen", "rejected")]
    expected = torch.corrcoef(torch.tensor([scores, lengths]))[0, 1].item()
    assert record["length_bias"]["correlation"] == pytest.approx(expected, abs=1e-4)
    assert record["truncated"] == 0 and f"Score against length: correlation {expected:+.2f}" in said
    assert "math-prm (rebuilt)" not in said and "3 of 447" in said


def test_subsets_without_rows_are_named(bench):
    record, _, said = bench()
    assert record["missing"] == ["Chat Hard"]
    assert "Chat Hard" in said and "alpacaeval-hard (of Chat)" in said and "donotanswer (of Safety)" in said


def test_another_model_is_compared_row_by_row(bench, head_dir, tmp_path):
    flipped = shutil.copytree(head_dir, tmp_path / "flipped")
    model = SegmentRewardModel.from_pretrained(flipped)
    with torch.no_grad():
        model.head.weight.neg_()
    model.save_pretrained(flipped)
    ours, out, _ = bench("ours")
    theirs, _, said = bench("theirs", reward_model=str(flipped), compare_to=str(out))
    found = theirs["comparison"]["all"]
    assert found["difference"] == pytest.approx(theirs["pooled"]["accuracy"] - ours["pooled"]["accuracy"])
    assert found["better"] + found["worse"] == 12 - ours["pooled"]["ties"] and "p (exact)" in said
    assert theirs["comparison"]["only_ours"] == 0


def test_rewardbenchs_own_files_have_its_field_names(bench, rows, head_dir, tmp_path):
    prior = tmp_path / "prior.jsonl"
    prior.write_text(json.dumps({"id": 1, "subset": "shp", "prompt": "q", "chosen": "a b", "rejected": "c"}) + "\n")
    record, out, _ = bench(prior_sets=str(prior))
    name = f"segrew/{head_dir.name}"
    accuracies = read_json(out / f"eval-set/{name}.json")
    about = {"model": name, "model_type": "Seq. Classifier", "chat_template": "tokenizer"}
    assert accuracies == about | {key: record["subsets"][key]["accuracy"] for key in SUBSETS}
    columns = read_json(out / f"eval-set-scores/{name}.json")
    assert set(columns) == set(about) | {
        "text_chosen", "text_rejected", "results", "subset", "id", "scores_chosen", "scores_rejected",
    }  # fmt: skip
    assert columns["id"] == [row["id"] for row in rows] and columns["subset"] == [row["subset"] for row in rows]
    assert (
        columns["text_chosen"][0].endswith(rows[0]["chosen"] + "<|im_end|>")
        and rows[0]["prompt"] in columns["text_chosen"][0]
    )
    assert columns["results"] == [
        int(a > b) for a, b in zip(columns["scores_chosen"], columns["scores_rejected"], strict=True)
    ]
    assert set(read_json(out / f"pref-sets/{name}.json")) == set(about) | {"shp"}
    accuracy = record["subsets"]["shp"]["accuracy"]
    assert record["sections"]["Prior Sets"]["accuracy"] == accuracy
    total = sum(record["sections"][s]["accuracy"] for s in ("Chat", "Safety", "Reasoning")) + 0.5 * accuracy
    assert record["overall"] == pytest.approx(total / 3.5)


# the other benchmarks through the same command


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rm_bench_says_that_mathematics_is_missing(bench, tmp_path):
    row = {
        "id": 1,
        "prompt": "Say hi.",
        "chosen": ["Hi.", "Hi there, you.", "**Hi**"],
        "rejected": ["No.", "Go off.", "*No*"],
    }
    path = write(tmp_path / "styles.jsonl", [row | {"domain": d} for d in ("chat", "code", "safety-refuse")])
    record, out, said = bench(benchmark="rm-bench", dataset_name=path)
    assert record["missing"] == ["math"] and "Missing: math, safety-response (of safety)" in said
    (scores, *_) = read_jsonl(out / "scores.jsonl")
    wins = [[a > b for b in scores["scores"][3:]] for a in scores["scores"][:3]]
    assert record["subsets"]["chat"]["matrix"] == wins
    assert (
        record["overall"]
        == pytest.approx(sum(map(sum, wins)) / 9)
        == pytest.approx(record["sections"]["chat"]["accuracy"])
    )


def test_rewardbench_2_reads_lists_and_ties(bench, tmp_path):
    best = {"id": "1", "prompt": "q", "chosen": ["yes"], "rejected": ["a", "b", "c"], "subset": "Math"}
    ties = [
        best | {"id": f"{kind}:3", "subset": "Ties", "chosen": chosen, "rejected": ["x", "y"]}
        for kind, chosen in (("ref", ["one"]), ("tied", ["one", "two"]))
    ]
    record, out, said = bench(benchmark="rewardbench2", dataset_name=write(tmp_path / "two.jsonl", [best, *ties]))
    assert set(record["subsets"]) == {"Math", "Ties"} and record["missing"] == [
        "Factuality",
        "Precise IF",
        "Safety",
        "Focus",
    ]
    scores = read_jsonl(out / "scores.jsonl")[0]["scores"]
    assert record["subsets"]["Math"]["accuracy"] == float(scores[0] > max(scores[1:])) and "gap_over_spread" in said


def test_judgebench_and_spans_through_the_command_line(head_dir, tmp_path, capsys):
    judge = {
        "pair_id": "1",
        "source": "mmlu-pro-law",
        "question": "q",
        "response_A": "a",
        "response_B": "b",
        "label": "B>A",
    }
    path = write(tmp_path / "judge.jsonl", [judge])
    argv = ["rewardbench", "--reward_model", str(head_dir), "--output_dir", str(tmp_path / "a")]
    assert main([*argv, "--benchmark", "judgebench", "--dataset_name", path]) == 0
    assert list(read_json(tmp_path / "a" / "results.json")["subsets"]) == ["knowledge"]
    argv[-1] = str(tmp_path / "b")
    assert main([*argv, "--benchmark", "localisation", "--max_per_subset", "1"]) == 0
    record = read_json(tmp_path / "b" / "results.json")
    assert {"benchmark", "subsets", "sections", "overall", "missing", "settings", "methods", "chance"} <= set(record)
    assert set(record["methods"]) == {"segments", "prefix_difference", "attention", "surprisal"}
    said = capsys.readouterr().out
    assert "lowest" in said and "chance" in said and "attention" in said
    argv[-1] = str(tmp_path / "c")
    assert main([*argv, "--benchmark", "pairs", "--bandit_model", "x"]) == 2
    assert "--bandit_model belongs to --benchmark localisation" in capsys.readouterr().err
