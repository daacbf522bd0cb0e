from hypothesis import given
from hypothesis import strategies as st

from reward_models.report_answers import RewardScale, answer_view, fault_contrast

UNIT = RewardScale(normalized=True, centre=0.0, spread=1.0)


def row(text, cuts, rewards, faults=()):
    edges = [0, *cuts, len(text)]
    segments = [
        {"text": text[a:b], "start": a, "end": b, "normalized": z, "reward": z}
        for a, b, z in zip(edges[:-1], edges[1:], rewards, strict=True)
    ]
    return {
        "response": text,
        "segments": segments,
        "faults": [dict(zip(("start", "end", "kind"), f, strict=True)) for f in faults],
    }


@given(st.text(max_size=40), st.data())
def test_pieces_always_rebuild_the_text(text, data):
    places = st.integers(-3, len(text) + 3)
    spans = st.lists(
        st.fixed_dictionaries({"start": places, "end": places, "normalized": st.floats(-9, 9)}), max_size=5
    )
    view = answer_view({"response": text, "segments": data.draw(spans), "faults": data.draw(spans)}, UNIT)
    assert "".join(piece.text for span in view.spans for piece in span.pieces) == text


def test_colour_steps_are_half_a_standard_deviation_and_end_at_two():
    rewards = [-5.0, -1.9, -0.26, -0.2, 0.0, 0.24, 0.3, 1.0, 2.0, 7.0]
    view = answer_view(row("0123456789", range(1, 10), rewards), UNIT)
    assert [span.level for span in view.spans] == [-4, -4, -1, 0, 0, 0, 1, 2, 4, 4]
    assert [span.value for span in view.spans][2:5] == ["−0.3", "−0.2", "+0.0"]


def test_segments_without_offsets_are_found_by_their_text():
    segments = [{"text": "ab", "normalized": 1.0}, {"text": "a", "normalized": -1.0}, {"text": "zz", "normalized": 0.0}]
    view = answer_view({"response": "abcad", "segments": segments}, UNIT)
    assert [("".join(p.text for p in s.pieces), s.level) for s in view.spans] == [
        ("ab", 2),
        ("c", None),
        ("a", -2),
        ("d", None),
    ]


def test_a_fault_is_ranked_by_the_segment_that_holds_most_of_it():
    view = answer_view(row("aaaabbbbcccc", [4, 8], [-2.0, 0.5, -1.0], [(3, 8, "rude"), (10, 12, "wrong_fact")]), UNIT)
    assert view.verdicts == [
        "rude: its segment has the highest reward of 3",
        "wrong fact: its segment has the 2nd lowest reward of 3",
    ]


def test_faults_of_one_kind_in_one_segment_are_counted_in_one_line():
    view = answer_view(row("aaaabbbb", [4], [-2.0, 0.5], [(0, 1, "rude"), (2, 3, "rude"), (5, 6, "rude")]), UNIT)
    assert view.verdicts == [
        "2 × rude: its segment has the lowest reward of 2",
        "rude: its segment has the highest reward of 2",
    ]


def test_an_answer_of_one_segment_has_no_rank():
    assert answer_view(row("abcdef", [], [0.0], [(0, 3, "rude")]), UNIT).verdicts == ["rude: the answer is one segment"]


def test_overlapping_faults_are_both_named():
    view = answer_view(row("abcdef", [], [0.0], [(0, 4, "rude"), (2, 6, "wrong")]), UNIT)
    assert [(p.text, p.fault) for p in view.spans[0].pieces] == [("ab", "rude"), ("cd", "rude, wrong"), ("ef", "wrong")]


def test_raw_rewards_are_standardized_over_all_answers():
    rows = [row("ab", [1], [1.0, 3.0]), row("ab", [1], [5.0, 7.0])]
    for one in rows:
        for segment in one["segments"]:
            segment["normalized"] = None
    scale = RewardScale.of(rows)
    assert (scale.normalized, scale.centre, scale.spread) == (False, 4.0, 5**0.5)


def test_fault_contrast_compares_within_answers_that_have_faults():
    rows = [row("aabb", [2], [-1.0, 2.0], [(0, 1, "rude")]), row("aabb", [2], [50.0, 50.0])]
    assert fault_contrast(rows, UNIT) == {"faulty": -1.0, "other": 2.0, "faulty_n": 1, "other_n": 1}
    assert fault_contrast(rows[1:], UNIT) is None
