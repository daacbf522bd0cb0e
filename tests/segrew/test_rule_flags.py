"""One set of flags for rules: each reaches the rule that reads it and is refused by one that does not."""

import dataclasses

import pytest

from policy.ppo_config import PPOConfig
from reward_models.train import RewardModelConfig
from segrew.data_command import DataConfig
from segrew.rule_flags import RuleFlags, RuleSettings
from segrew.segment_command import SegmentConfig
from segrew.segmentation import RULES, SegmentationConfig

OTHERS = {
    "threshold": 1.0, "quantile": 0.5, "target_length": 4.0, "n": 3, "lengths": [1, 2], "repeats": 2,
    "when_exhausted": "reshuffle", "language": "de", "max_phrase_words": 7, "parser": "elsewhere", "max_code_tokens": 3,
}  # fmt: skip
READERS = {
    "threshold": {"entropy"}, "quantile": {"entropy"}, "target_length": {"entropy"}, "n": {"ngram"},
    "lengths": {"random_ngram"}, "repeats": {"random_ngram"}, "when_exhausted": {"random_ngram"},
    "language": {"sentence", "python_ast"}, "max_phrase_words": {"constituency"}, "parser": {"constituency"},
    "max_code_tokens": {"python_ast"},
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("flag", OTHERS)
def test_a_flag_is_read_or_refused(rule, flag):
    flags = RuleFlags(rule=rule, **{flag: OTHERS[flag]})
    if rule in READERS[flag]:
        expected = tuple(OTHERS[flag]) if flag == "lengths" else OTHERS[flag]
        assert getattr(flags.segmentation(), flag) == expected
    else:
        with pytest.raises(ValueError, match=rf"--{flag} .*: rule {rule} does not read it") as error:
            flags.segmentation()
        assert all(reader in str(error.value) for reader in READERS[flag])


def test_defaults_are_those_of_the_rules():
    for rule in RULES:
        assert RuleFlags(rule=rule).segmentation() == SegmentationConfig(rule)
    assert RuleFlags(rule="ngram", n=None).segmentation().n is None


def test_every_command_has_the_same_flags():
    def flags(cls):
        return {field.name: (field.type, field.metadata["help"]) for field in dataclasses.fields(cls)}

    for cls in (RewardModelConfig, SegmentConfig):
        assert flags(RuleFlags).items() <= flags(cls).items()
    assert flags(RuleSettings).items() <= flags(PPOConfig).items()
    assert flags(RuleSettings).items() <= flags(DataConfig).items()


def test_what_a_command_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"--rule random_ngram: draws other units each time.*--action_rule"):
        RewardModelConfig(rule="random_ngram")
    with pytest.raises(ValueError, match=r"--rule perplexity: .*`segrew data` runs none; `segrew segment` does"):
        DataConfig(rule="perplexity")
    with pytest.raises(ValueError, match=r"--threshold 1\.5: rule token does not read it"):
        RewardModelConfig(rule="token", threshold=1.5)
    with pytest.raises(ValueError, match=r"--parser none: no such spaCy pipeline|spaCy, which is not installed"):
        SegmentConfig(rule="constituency", parser="none")


def test_a_language_is_a_code():
    for wrong in ("english", "EN", "", "e"):
        with pytest.raises(ValueError, match=f"--language {wrong}: expected an ISO 639 code"):
            RuleSettings(language=wrong).rule_named("sentence")
    assert [RuleSettings(language=x).rule_named("sentence").language for x in ("de", "nds-nl")] == ["de", "nds-nl"]
