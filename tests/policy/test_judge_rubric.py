"""What the judge is asked is data, and its verdicts are read from lines of their own."""

import pytest

from policy.answer_files import Reply
from policy.judge_rubric import RUBRICS, Rubric
from segrew.config import read_yaml

USER = {"role": "user", "content": "Why {x}?"}


def test_the_shipped_rubric_has_the_dimensions_and_one_prompt_for_all():
    names = ["overall", "helpfulness", "relevance", "coherence", "consistency", "fluency", "factuality"]
    assert list(read_yaml(RUBRICS)["dimensions"]) == names
    request = Rubric.load(None, names).request(Reply("", [USER], "first {text}"), Reply("", [USER], "second"))
    assert all(f"- {name}: " in request and request.endswith("factuality:\n") for name in names)
    order = ["Why {x}?", "<answer_A>\nfirst {text}", "<answer_B>\nsecond", "- overall"]
    assert sorted(order, key=request.index) == order


def test_later_turns_are_shown_with_the_conversation_that_led_to_them():
    def reply(before, text):
        return Reply("", [USER, {"role": "assistant", "content": before}, {"role": "user", "content": "More?"}], text)

    request = Rubric.load(None, ["overall"]).request(reply("one", "two"), reply("uno", "dos"))
    asked, first, second = (request.split(tag)[1] for tag in ("<request>", "<answer_A>", "<answer_B>"))
    asked, first = asked.split("</request>")[0], first.split("</answer_A>")[0]
    assert "Why" in asked and "More?" in asked and "one" not in asked and "uno" not in asked
    assert first.index("one") < first.index("More?") < first.index("two") and "uno" in second and "dos" in second


@pytest.mark.parametrize(
    "reply, expected",
    [
        ("Good reasons.\nfluency: A\noverall: tie", {"fluency": "A", "overall": "tie"}),
        ("**Fluency:** B\n- overall: **Tie**.", {"fluency": "B", "overall": "tie"}),
        ("fluency: a\noverall: Answer B", {"fluency": "A", "overall": "B"}),
        ("fluency: A\nOn reflection:\nfluency: B", {"fluency": "B", "overall": None}),
        ("fluency: A is better\noverall: A/B/tie", {"fluency": None, "overall": None}),
        ("fluency: C\noverall:\n\nA", {"fluency": None, "overall": None}),
        ("unfluency: A\nI say overall: B", {"fluency": None, "overall": None}),
        ("", {"fluency": None, "overall": None}),
    ],
)
def test_verdicts_are_read_from_lines_of_their_own(reply, expected):
    assert Rubric.load(None, ["fluency", "overall"]).read(reply) == expected


GOOD = "{request} {first} {second} {dimensions} {verdicts}"


@pytest.mark.parametrize(
    "text, names, message",
    [
        (f"prompt: '{GOOD}'\n", ["x"], "needs 'prompt', a text, and 'dimensions'"),
        (f"prompt: '{GOOD}'\ndimensions: [x]\n", ["x"], "needs 'prompt', a text, and 'dimensions'"),
        (f"prompt: '{GOOD} {{third}}'\ndimensions: {{x: y}}\n", ["x"], "{third}"),
        ("prompt: '{request} {first} {dimensions} {verdicts}'\ndimensions: {x: y}\n", ["x"], "{second}"),
        (f"prompt: '{GOOD} }}'\ndimensions: {{x: y}}\n", ["x"], "stray brace"),
        (f"prompt: '{GOOD}'\ndimensions: {{x: y}}\n", ["x", "z"], "--dimensions z: not in the rubric, which has x"),
    ],
)
def test_another_rubric_is_checked(tmp_path, text, names, message):
    path = tmp_path / "rubric.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        Rubric.load(str(path), names)
    assert message in str(error.value)
