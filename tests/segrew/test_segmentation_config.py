import json
import warnings

import pytest
import torch
from jaxtyping import TypeCheckError

from segrew.response_text import ResponseText
from segrew.segmentation import RULES, SegmentationConfig, segment, segment_by_entropy

NAMES = {"segmenter": "model-a", "tokenizer": "tok-a", "read_position": "end"}


def own_entropies() -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows, left- and right-padded; first tokens hold 99, padding NaN, the rest 1 … 10."""
    entropy = torch.full((2, 8), float("nan"))
    entropy[0, :7] = torch.tensor([99.0, 3, 1, 10, 5, 8, 2])
    entropy[1, 3:] = torch.tensor([99.0, 4, 7, 6, 9])
    return entropy, entropy.isfinite()


def test_quantile_of_own_entropy_skips_first_tokens_and_padding():
    config = SegmentationConfig(quantile=0.75).resolve(*own_entropies())
    assert config.threshold == 7.75 and config.quantile == 0.75  # 0.75 · 9 = 6.75 steps above 1
    assert SegmentationConfig().quantile == 0.8


@pytest.mark.parametrize(("length", "units"), [(12, 2), (6, 2), (4, 3), (2, 6), (1.2, 10)])
def test_target_length_gives_units_of_that_mean_length(length: float | int, units: int):
    entropy, mask = own_entropies()
    config = SegmentationConfig(target_length=length).resolve(entropy, mask)
    assert segment_by_entropy(entropy, mask, threshold=config.threshold).counts.sum() == units


def test_a_target_length_beyond_the_responses_is_said_to_be_missed():
    entropy, mask = torch.rand(2, 6, generator=torch.Generator().manual_seed(0)), torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    with pytest.warns(
        UserWarning, match=r"target_length 100: missed, as responses have 5.0 tokens on average.* rule response"
    ):
        rule = SegmentationConfig(target_length=100).resolve(entropy, mask)
    assert segment_by_entropy(entropy, mask, threshold=rule.threshold).counts.tolist() == [1, 1]
    with warnings.catch_warnings(action="error"):
        SegmentationConfig(target_length=5).resolve(entropy, mask)


def test_resolve_leaves_other_rules_and_given_thresholds_alone():
    for config in (SegmentationConfig("token"), SegmentationConfig(threshold=1.75)):
        assert config.resolve(*own_entropies()) is config
    with pytest.raises(ValueError, match="no response has a second token"):
        SegmentationConfig().resolve(torch.ones(3, 1), torch.ones(3, 1, dtype=torch.bool))


@pytest.mark.parametrize(
    "config",
    [
        SegmentationConfig(quantile=0.75).resolve(*own_entropies()),
        SegmentationConfig("random_ngram", lengths=(1, 4)),
        SegmentationConfig("ngram", n=None),
        SegmentationConfig("python_ast", max_code_tokens=3, language="de"),
        SegmentationConfig("constituency", parser="some/where", max_phrase_words=7),
    ],
)
def test_survives_json(config: SegmentationConfig):
    assert SegmentationConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"threshold": 1.0, "quantile": 0.5}, "threshold and quantile exclude each other"),
        ({"quantile": 0.5, "target_length": 4.0}, "quantile and target_length exclude"),
        ({"threshold": float("inf")}, "threshold inf"),
        ({"threshold": -1}, "threshold -1: entropies are never negative.* rule token"),
        ({"quantile": 1.5}, "quantile 1.5"),
        ({"target_length": 0.5}, "target_length 0.5"),
        ({"rule": "ngram", "n": 0}, "n 0"),
        ({"rule": "random_ngram", "lengths": ()}, "lengths"),
        ({"rule": "random_ngram", "repeats": 0}, "repeats 0"),
        ({"rule": "constituency", "max_phrase_words": 0}, "max_phrase_words 0"),
        ({"rule": "python_ast", "max_code_tokens": 0}, "max_code_tokens 0"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        SegmentationConfig(**wrong)


def test_unknown_names_are_refused():
    with pytest.raises((ValueError, TypeCheckError), match="paragraph"):
        SegmentationConfig(rule="paragraph")
    with pytest.raises(ValueError, match="unknown segmentation settings treshold"):
        SegmentationConfig.from_dict({"treshold": 1.0})


def test_fingerprint_covers_what_the_rule_reads_and_nothing_else():
    base = SegmentationConfig(threshold=1.75)
    print_of = base.fingerprint(**NAMES)
    for other in ("segmenter", "tokenizer", "read_position"):
        assert base.fingerprint(**{**NAMES, other: "content"}) != print_of
    assert SegmentationConfig(threshold=1.76).fingerprint(**NAMES) != print_of
    same = SegmentationConfig(threshold=1.75, quantile=0.9, resolved=True, n=3, repeats=9)
    assert same.fingerprint(**NAMES) == print_of


def test_fingerprint_of_rules_without_a_segmenter_does_not_depend_on_it():
    for rule in ("token", "response", "ngram", "random_ngram"):
        config = SegmentationConfig(rule)
        assert config.fingerprint(**NAMES) == config.fingerprint(**{**NAMES, "segmenter": "model-b"})
    perplexity = SegmentationConfig("perplexity")
    assert perplexity.fingerprint(**NAMES) != perplexity.fingerprint(**{**NAMES, "segmenter": "model-b"})
    assert SegmentationConfig("ngram", n=5).fingerprint(**NAMES) != SegmentationConfig("ngram", n=6).fingerprint(
        **NAMES
    )


def test_fingerprint_needs_the_threshold():
    with pytest.raises(ValueError, match="call resolve first"):
        SegmentationConfig().fingerprint(**NAMES)


def test_labels():
    assert SegmentationConfig(threshold=1.75).label == "entropy>1.75"
    assert SegmentationConfig().label == "entropy>q0.8"
    assert SegmentationConfig(target_length=4.0).label == "entropy~4-tokens"
    assert [SegmentationConfig(rule).label for rule in ("token", "ngram")] == ["token", "ngram-5"]
    assert SegmentationConfig("ngram", n=None).label == "ngram"
    assert [SegmentationConfig(rule).label for rule in ("sentence", "constituency", "python_ast")] == [
        "sentence", "constituency-5", "python_ast-10",
    ]  # fmt: skip


def test_b11_a_rule_of_tensors_moves_its_cuts_behind_the_character():
    """a🙂é in bytes: the emoji is tokens 1 to 4. Every rule but token obeys; the row's padding is on either side."""
    text = ResponseText("a🙂é", [(0, 1), *[(1, 2)] * 4, *[(2, 3)] * 2])
    mask = torch.tensor([[True] * 7 + [False], [False] + [True] * 7])
    entropy = torch.zeros(2, 8)
    entropy[0, 3] = entropy[1, 4] = 9.0
    units = segment(SegmentationConfig(threshold=1.0), mask, entropy=entropy, texts=[text, text])
    assert units.ids.tolist() == [[0] * 5 + [1] * 2 + [-1], [-1] + [0] * 5 + [1] * 2]
    units = segment(SegmentationConfig("ngram", n=2), mask, texts=[text, text])
    assert units.ids.tolist() == [[0] * 5 + [1] * 2 + [-1], [-1] + [0] * 5 + [1] * 2]
    assert segment(SegmentationConfig("token"), mask, texts=[text, text]).counts.tolist() == [7, 7]


def test_segment_runs_every_rule_and_joins_the_stop_token():
    mask = torch.ones(1, 6, dtype=torch.bool)
    inputs = {
        "entropy": torch.tensor([[9.0, 0, 9, 0, 0, 9]]),
        "logprobs": -torch.tensor([[5.0, 3, 2, 9, 4, 1]]),
        "generator": torch.Generator().manual_seed(0),
    }
    counts = {
        rule: segment(SegmentationConfig(rule, threshold=1.0), mask, ended=torch.tensor([True]), **inputs).counts.item()
        for rule in RULES
        if rule not in ("random_ngram", "sentence", "constituency", "python_ast")
    }
    assert counts == {"entropy": 2, "token": 5, "response": 1, "ngram": 1, "perplexity": 2}
    assert segment(SegmentationConfig("ngram", n=5), mask).counts.item() == 2
    assert segment(SegmentationConfig("random_ngram", lengths=(3,), repeats=1), mask, **inputs).counts.item() == 2


@pytest.mark.parametrize(
    ("rule", "needed"),
    [
        ("entropy", "entropy"),
        ("perplexity", "logprobs"),
        ("random_ngram", "generator"),
        ("sentence", "texts"),
        ("constituency", "texts"),
        ("python_ast", "texts"),
    ],
)
def test_segment_names_the_missing_input(rule: str, needed: str):
    with pytest.raises(ValueError, match=f"needs {needed}; pass {needed}="):
        segment(SegmentationConfig(rule, threshold=1.0), torch.ones(1, 3, dtype=torch.bool))


def test_segment_wants_a_resolved_threshold():
    with pytest.raises(ValueError, match="call resolve"):
        segment(SegmentationConfig(), torch.ones(1, 3, dtype=torch.bool), entropy=torch.ones(1, 3))


def test_a_rule_can_be_plugged_in(monkeypatch):
    monkeypatch.setitem(RULES, "ngram", lambda mask, *, n, entropy: segment_by_entropy(entropy, mask, threshold=n))
    config = SegmentationConfig("ngram", n=2)
    units = segment(config, torch.ones(1, 3, dtype=torch.bool), entropy=torch.tensor([[0.0, 3.0, 1.0]]))
    assert units.counts.item() == 2
    assert config.fingerprint(**NAMES) != config.fingerprint(**{**NAMES, "segmenter": "model-b"})
