"""The README.md of a reward-model directory, read by the hub's own parser."""

import shutil

import pytest
import yaml
from huggingface_hub import ModelCard

from reward_models.calibrate import main as calibrate
from reward_models.model_card import keep_benchmark, render_model_card
from reward_models.rewardbench import main as rewardbench
from segrew.run_directory import read_json, write_json

RESULTS = {
    "benchmark": "rewardbench",
    "subsets": {"alpacaeval-easy": {"n": 100}, "donotanswer": {"n": 136}},
    "sections": {"Chat": {"accuracy": 0.93, "n": 100}, "Safety": {"accuracy": 0.5, "n": 136}},
    "overall": 0.715,
    "settings": {"dataset": "allenai/reward-bench"},
}


@pytest.fixture
def directory(tmp_path, head_dir):
    path = shutil.copytree(head_dir, tmp_path / "rm")
    card, evaluation = read_json(path / "segrew.json"), read_json(path / "evaluation.json")
    write_json(path / "segrew.json", card | {"base_model": "org/model", "aggregator": "softmax"})
    numbers = {"accuracy": 0.7125, "n": 80, "ci95": [0.605, 0.8], "length_baseline": 0.5, "train_pairs": 700}
    sources = {"dataset": "org/pairs", "eval_dataset": "org/pairs"}
    write_json(path / "evaluation.json", evaluation | numbers | sources)
    (path / "README.md").write_text(render_model_card(path))
    return path


def metrics_of(path) -> dict[str, float]:
    return {result.metric_name: result.metric_value for result in ModelCard.load(path / "README.md").data.eval_results}


def test_it_holds_the_numbers_of_the_run(directory):
    data = ModelCard.load(directory / "README.md").data
    assert data.tags == ["reward-model", "dense-reward", "segrew"] and data.pipeline_tag == "text-classification"
    assert data.base_model == "org/model" and data.datasets == ["org/pairs"] and data.library_name == "transformers"
    assert metrics_of(directory) == {"accuracy on held-out pairs": 0.7125}
    text = (directory / "README.md").read_text()
    rule = read_json(directory / "segrew.json")["segmentation"]["threshold"]
    for word in ("700 preference pairs", f"entropy>{rule:g}", "softmax", "0.605 to 0.800", "no normalizer yet"):
        assert word in text


def test_local_names_stay_out_of_the_hub_s_metadata(head_dir):
    metadata = yaml.safe_load((head_dir / "README.md").read_text().split("---")[1])
    assert not {"base_model", "datasets", "model-index"} & set(metadata)


def test_benchmarks_enter_its_model_index(directory):
    keep_benchmark(directory, RESULTS)
    assert metrics_of(directory) == {
        "accuracy on held-out pairs": 0.7125,
        "rewardbench Chat": 0.93,
        "rewardbench Safety": 0.5,
        "rewardbench overall": 0.715,
    }
    assert "| Safety | 136 | 0.500 |" in (directory / "README.md").read_text()
    keep_benchmark(directory, RESULTS | {"overall": None, "sections": {}})
    assert "rewardbench overall" not in metrics_of(directory)


def test_an_edited_card_is_left_alone(directory):
    (directory / "README.md").write_text("# Mine\n")
    keep_benchmark(directory, RESULTS)
    assert (directory / "README.md").read_text() == "# Mine\n"
    assert read_json(directory / "benchmark-rewardbench.json") == RESULTS


def test_calibrate_and_rewardbench_keep_it_up(tmp_path, head_dir, pairs_file):
    path = shutil.copytree(head_dir, tmp_path / "rm")
    (path / "README.md").write_text(render_model_card(path))
    calibrate(["--reward_model", str(path), "--dataset_name", str(pairs_file)])
    normalizer = read_json(path / "normalizer.json")
    assert f"mean {normalizer['w_mu']:+.4f} ln p" in (path / "README.md").read_text()
    flags = ["--reward_model", str(path), "--dataset_name", str(pairs_file), "--benchmark", "pairs"]
    rewardbench([*flags, "--output_dir", str(tmp_path / "quick"), "--max_per_subset", "2"])
    assert not (path / "benchmark-pairs.json").exists()  # a quick look is no result
    rewardbench([*flags, "--output_dir", str(tmp_path / "bench")])
    overall = read_json(tmp_path / "bench" / "results.json")["overall"]
    assert metrics_of(path)["pairs overall"] == pytest.approx(overall, abs=1e-4)


def test_a_released_normalizer_is_written_for_its_rule(tmp_path, head_dir, capsys):
    path = shutil.copytree(head_dir, tmp_path / "rm")
    with pytest.raises(ValueError, match=r"preset phi3-mini-1\.75 was fitted for rule entropy>1\.75"):
        calibrate(["--reward_model", str(path), "--preset", "phi3-mini-1.75"])
    with pytest.raises(ValueError, match=r"--preset phi3-mini-1\.75: .*leave out --normalizer"):
        calibrate(["--reward_model", str(path), "--preset", "phi3-mini-1.75", "--normalizer", "global"])
    card = read_json(path / "segrew.json")
    write_json(path / "segrew.json", card | {"segmentation": {"rule": "entropy", "threshold": 1.75}})
    calibrate(["--reward_model", str(path), "--preset", "phi3-mini-1.75"])
    assert read_json(path / "normalizer.json")["w_mu"] == 0.7668
