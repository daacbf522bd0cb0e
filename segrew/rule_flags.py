"""The flags of segmentation rules, once for every command that takes a rule."""

import re
from dataclasses import dataclass, fields, replace

from segrew.config import arg, given
from segrew.segmentation import RULES, Compat, Rule, SegmentationConfig, WhenExhausted

_ENTROPY_THRESHOLDS = ("threshold", "quantile", "target_length")


@dataclass
class RuleSettings:
    """What rules read besides an entropy threshold; each reads its own."""

    n: int | None = arg(5, help="Tokens a unit, for the rule ngram; null makes the whole response one.")
    lengths: list[int] = arg([2, 3, 5, 10], help="Lengths that are dealt out, for the rule random_ngram.")
    repeats: int = arg(3, help="How often each of --lengths is dealt, for the rule random_ngram.")
    when_exhausted: WhenExhausted = arg(
        "remainder", help="When all lengths are dealt: the rest is one unit, or reshuffle. For the rule random_ngram."
    )
    language: str = arg("en", help="Language of the prose, for the rules sentence and python_ast (ISO 639 code).")
    max_phrase_words: int = arg(5, help="Most words of a phrase, for the rule constituency.")
    parser: str = arg("en_core_web_sm", help="Name or path of a spaCy pipeline, for the rule constituency.")
    max_code_tokens: int = arg(10, help="Most tokens of a statement or expression, for the rule python_ast.")

    def rule_named(self, rule: str, **threshold: float | None) -> SegmentationConfig:
        """Return a rule with these settings.

        Raises:
            ValueError: one is out of range, or the language is no code; the splitter would cut by another one's rules.
        """
        if not re.fullmatch(r"[a-z]{2,3}(-[a-z]+)*", self.language):
            raise ValueError(f"--language {self.language}: expected an ISO 639 code in lower case, such as en or de.")
        return SegmentationConfig(
            rule=rule,  # type: ignore[arg-type]
            n=self.n,
            lengths=tuple(self.lengths),
            repeats=self.repeats,
            when_exhausted=self.when_exhausted,
            language=self.language,
            max_phrase_words=self.max_phrase_words,
            parser=self.parser,
            max_code_tokens=self.max_code_tokens,
            **threshold,  # type: ignore[arg-type]
        )

    def refuse_unread(self, rules: list[SegmentationConfig], names: dict[str, str] | None = None) -> None:
        """Refuse settings that were given and that none of the rules reads.

        Args:
            rules: those that the settings are for.
            names: more flags, and the setting that each of them stands for.

        Raises:
            ValueError: naming the flag and the rules.
        """
        flags = {field.name: field.name for field in fields(RuleSettings)} | (names or {})
        read = set().union(*(rule.reads for rule in rules))
        for flag in given(flags, self):
            if (setting := flags[flag]) not in read:
                used = " and ".join(dict.fromkeys(f"rule {rule.rule}" for rule in rules)) or "the model's own rule"
                raise ValueError(
                    f"--{flag} {getattr(self, flag)}: {used} does not read it; leave it out, or choose a rule that "
                    f"does ({', '.join(_readers(setting))})."
                )


@dataclass
class RuleFlags(RuleSettings):
    """Where units end, with an entropy threshold in any of its three forms."""

    rule: Rule = arg("entropy", help="Where units end.")
    threshold: float | None = arg(None, help="Entropy (nats) above which a token opens a unit.")
    quantile: float | None = arg(None, help="The threshold as a quantile of the model's own entropy (default 0.8).")
    target_length: float | None = arg(None, help="The threshold that gives units of this mean length, in tokens.")
    compat: Compat | None = arg(None, help="dense_rlhf_release: the stop token is in no unit, as in 2501.02790's code.")

    def segmentation(self) -> SegmentationConfig:
        """Return the rule; a threshold that is not in nats is yet to be resolved.

        Raises:
            ValueError: a value is out of range, or the rule does not read it.
        """
        rule = self.rule_named(
            self.rule, threshold=self.threshold, quantile=self.quantile, target_length=self.target_length
        )
        self.refuse_unread([rule], dict.fromkeys(_ENTROPY_THRESHOLDS, "threshold"))
        return replace(rule, compat=self.compat)


def _readers(setting: str) -> list[str]:
    return [name for name in RULES if setting in SegmentationConfig(name).reads]  # type: ignore[arg-type]
