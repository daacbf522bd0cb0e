"""`segrew segment` and `segrew data` with any rule: units, their lengths in a table and a picture."""

import json

import pytest
import torch

from segrew.cli import main
from segrew.run_directory import read_jsonl
from segrew.segmentation import RULES, Segmentation, SegmentationConfig
from segrew.unit_lengths import QUANTILES, UnitLengths, over_thresholds


@pytest.fixture
def run(tmp_path, tiny_dir, pairs_file, capsys):
    def segment(*flags) -> tuple[list[dict], str]:
        out = tmp_path / "out"
        argv = ["segment", "--model_name_or_path", tiny_dir, "--dataset_name", pairs_file, "--output_dir", out, *flags]
        assert main([str(word) for word in [*argv, "--overwrite_output_dir", "true"]]) == 0
        assert (out / "lengths.svg").read_text().startswith("<?xml")
        return read_jsonl(out / "segments.jsonl"), capsys.readouterr().out

    return segment


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "constituency"])
def test_any_rule_writes_units_that_rebuild_the_answers(run, short_pairs, rule):
    rows, shown = run("--rule", rule, "--max_pairs", "3")
    texts = [text for pair in short_pairs[:3] for text in (pair.chosen, pair.rejected)]
    assert ["".join(unit["text"] for unit in row["units"]) for row in rows] == texts
    assert all(("entropy" in row) == (rule in ("entropy", "perplexity")) for row in rows)
    assert "units a response" in " ".join(shown.split()) and ("quantile" in shown) == (rule == "entropy")


def test_a_length_beyond_the_context_is_refused(tmp_path, tiny_dir, pairs_file, capsys):
    argv = ["segment", "--model_name_or_path", tiny_dir, "--dataset_name", pairs_file, "--output_dir", tmp_path / "out"]
    assert main([str(word) for word in [*argv, "--max_length", 1025]]) == 2
    assert "--max_length 1025: the context of" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_parsing_rule_takes_its_pipeline_from_the_flag(run, parser_dir):
    rows, _ = run("--rule", "constituency", "--parser", parser_dir, "--max_phrase_words", "2")
    texts = [[unit["text"] for unit in row["units"]] for row in rows]
    assert all(len(unit.split()) <= 3 for units in texts for unit in units)


def test_a_wanted_length_is_met_and_stored(run, tmp_path):
    rows, shown = run("--target_length", "3")
    tokens = sum(len(row["entropy"]) for row in rows)
    assert tokens / sum(len(row["units"]) for row in rows) == pytest.approx(3, rel=0.1)
    stored = json.loads((tmp_path / "out" / "segmentation.json").read_text())
    assert stored["target_length"] == 3 and f"{stored['threshold']:.3f}" in shown
    assert sum(f"quantile {quantile:g}" in shown for quantile in QUANTILES) == len(QUANTILES)


def test_thresholds_are_tried_without_leaving_anything_behind(tmp_path, tiny_dir, pairs_file, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    files = ["--model_name_or_path", str(tiny_dir), "--dataset_name", str(pairs_file)]
    for threshold in ("1", "2"):
        assert main(["segment", *files, "--threshold", threshold]) == 0
        said = capsys.readouterr().out
        assert f"entropy>{threshold}" in said and "Nothing is written; --output_dir keeps" in said
    assert set(tmp_path.rglob("*")) == before


def test_lengths_by_hand():
    cut = Segmentation(torch.tensor([[0, 0, 0, 1, 2, -1], [0, 0, 0, 0, 0, 0]]))
    lengths = UnitLengths.of(SegmentationConfig("ngram"), cut)
    assert (lengths.mean, lengths.median, lengths.long, lengths.per_response) == (11 / 4, 1, 3, 2)


def test_higher_thresholds_give_longer_units(build_byte_tokenizer):
    entropy = torch.rand(4, 200, generator=torch.Generator().manual_seed(0))
    mask, ended = torch.ones(4, 200, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)
    rows = over_thresholds(entropy, mask, ended, None)
    assert [row.rule.quantile for row in rows] == list(QUANTILES)
    for row in rows:  # 199 of a row's tokens may open a unit, a share 1 − quantile of them does
        assert row.per_response == pytest.approx(1 + 199 * (1 - row.rule.quantile), abs=1)
        assert row.mean == pytest.approx(200 / row.per_response, rel=1e-3)
        assert row.median <= row.long


def test_data_shows_the_units_of_its_example(tiny_dir, pairs_file, capsys):
    argv = ["data", "--model_name_or_path", str(tiny_dir), "--dataset_name", str(pairs_file)]
    assert main([*argv, "--rule", "ngram", "--n", "4"]) == 0
    assert "units by rule ngram-4" in " ".join(capsys.readouterr().out.split())
    assert main(argv) == 0
    assert "units by rule sentence" in " ".join(capsys.readouterr().out.split())
    assert main([*argv, "--rule", "entropy"]) == 2
    assert "`segrew segment` does" in capsys.readouterr().err


def test_lengths_are_ordered_without_torchs_quantile_which_refuses_many_units(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "quantile", None)  # beyond 2**24 numbers it raises
    ids = torch.arange(10).repeat_interleave(torch.tensor([3, 1] * 5))[None]
    found = UnitLengths.of(SegmentationConfig("token"), Segmentation(ids))
    assert (found.mean, found.median, found.long, found.per_response) == (2.0, 1.0, 3.0, 10.0)
