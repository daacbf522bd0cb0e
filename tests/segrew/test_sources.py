"""Parts by stage, mixtures by weight, reading no more than is used, and what a run keeps of it."""

import json
import warnings
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segrew.data_options import STAGES, DataOptions
from segrew.preferences import load_preferences
from segrew.prompts import load_prompts
from segrew.sources import DataRecord, _quotas, prompt_key, stage_of, warn_of_shared_prompts, write_records


def row(name, number):
    return {"id": f"{name}{number}", "prompt": f"{name} {number}", "chosen": "a", "rejected": "b"}


@pytest.fixture
def files(tmp_path):
    """Two files of 30 and of 10 pairs."""
    paths = []
    for name, count in (("x", 30), ("y", 10)):
        paths.append(str(tmp_path / f"{name}.jsonl"))
        rows = [json.dumps(row(name, i)) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return paths


def counts(loaded) -> Counter:
    assert len({pair.id for pair in loaded.pairs}) == len(loaded.pairs)
    return Counter(pair.id[0] for pair in loaded.pairs)


def test_without_weights_everything_is_there(files):
    assert counts(load_preferences(files)) == {"x": 30, "y": 10}
    assert counts(load_preferences(files, limit=20)) == {"x": 15, "y": 5}


@pytest.mark.parametrize("weights, limit, expected", [
    ([0.5, 0.5], None, {"x": 10, "y": 10}),  # the largest mixture in which nothing is there twice
    ([9.0, 1.0], None, {"x": 30, "y": 3}),
    ([0.7, 0.3], 10, {"x": 7, "y": 3}),
    ([1.0, 2.0], 10, {"x": 3, "y": 7}),
    ([0.5, 0.5], 99, {"x": 10, "y": 10}),
])  # fmt: skip
def test_weights_are_shares_of_the_mixture(files, weights, limit, expected):
    loaded = load_preferences(files, options=DataOptions(dataset_weights=weights), limit=limit)
    assert counts(loaded) == expected
    assert [source.used for source in loaded.sources] == [expected["x"], expected["y"]]


def test_prompts_that_are_trained_on_and_held_out_are_counted():
    with pytest.warns(UserWarning, match="2 of 3 evaluation pairs have a prompt that is trained on too") as caught:
        warn_of_shared_prompts(iter("abc"), ["a", "d", "a"], "pairs")
    assert len(caught) == 1
    with warnings.catch_warnings(action="error"):
        warn_of_shared_prompts("abc", ["d"], "pairs")
        warn_of_shared_prompts("abc", [], "pairs")


def test_b34_a_mixture_is_the_same_for_the_same_seed_only(files):
    options = DataOptions(dataset_weights=[0.5, 0.5])
    first, again, other = (
        [pair.id for pair in load_preferences(files, options=options, seed=seed).pairs] for seed in (1, 1, 2)
    )
    assert first == again and set(first) != set(other) and first != sorted(first)
    assert {"x", "y"} == {name[0] for name in first[:8]}  # mixed, not one set after the other


def test_a_single_set_gives_its_first_pairs_and_reads_no_further(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(row("x", i)) for i in range(3)) + "\nnot json")
    loaded = load_preferences(str(path), limit=3)
    assert [pair.id for pair in loaded.pairs] == ["x0", "x1", "x2"] and loaded.sources[0].rows == 3
    with pytest.raises(ValueError, match="line 4"):
        load_preferences(str(path))


def test_streaming_reads_only_each_set_s_share(files):
    options = DataOptions(streaming=True, dataset_weights=[0.5, 0.5])
    loaded = load_preferences(files, options=options, limit=8)
    assert sorted(pair.id for pair in loaded.pairs) == [f"{name}{i}" for name in "xy" for i in range(4)]
    assert [source.rows for source in loaded.sources] == [4, 4]
    loaded = load_preferences(files, options=options, limit=40)  # y has too few, and the shares stay as they were
    assert counts(loaded) == {"x": 10, "y": 10}
    with pytest.raises(ValueError, match="--streaming true: say how many rows to use at most"):
        load_preferences(files, options=options)
    with pytest.raises(ValueError, match="give each its share with --dataset_weights"):
        load_preferences(files, options=DataOptions(streaming=True), limit=8)


@pytest.mark.parametrize("settings_, message", [
    ({"dataset_weights": [1.0, 0.0]}, "--dataset_weights .*each must be positive"),
    ({"stage": "ppo"}, "--stage ppo: of which parts"),
    ({"stage_split": "20,40"}, "--stage_split 20,40: needs three percentages"),
    ({"stage_split": "20,40,30"}, "that add up to 100"),
    ({"stage_split": "a,b,c"}, "that add up to 100"),
    ({"max_line_bytes": 0}, "--max_line_bytes 0: must be at least 1"),
])  # fmt: skip
def test_bad_options_are_refused(settings_, message):
    with pytest.raises(ValueError, match=message):
        DataOptions(**settings_)


def test_weights_must_be_one_for_each_set(files):
    with pytest.raises(ValueError, match="3 weights for 2 data sets"):
        load_preferences(files, options=DataOptions(dataset_weights=[1.0, 1.0, 1.0]))


@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=5), total=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_quotas_add_up_and_are_within_one_of_their_share(weights, total):
    quotas = _quotas(weights, total)
    assert sum(quotas) == total
    assert all(abs(q - total * w / sum(weights)) <= 1 for q, w in zip(quotas, weights, strict=True))


SPLIT = "20,40,40"


def test_stages_are_disjoint_by_prompt_and_all_there(tmp_path):
    """Each of 300 prompts stands in three rows, in another order each time."""
    path, rows = tmp_path / "a.jsonl", [row("x", i) for i in range(300)]
    path.write_text("\n".join(json.dumps(r) for r in rows + rows[::-1] + rows))
    parts = {
        stage: load_preferences(str(path), options=DataOptions(stage_split=SPLIT, stage=stage)) for stage in STAGES
    }
    prompts = {stage: {pair.prompt[0]["content"] for pair in part.pairs} for stage, part in parts.items()}
    assert sum(map(len, prompts.values())) == len(set().union(*prompts.values())) == 300
    for stage, share in zip(STAGES, (60, 120, 120), strict=True):
        assert len(parts[stage].pairs) == 3 * len(prompts[stage])
        assert abs(len(prompts[stage]) - share) < 40  # four standard deviations
        assert parts[stage].skipped == {"in another stage": 900 - len(parts[stage].pairs)}
    assert load_preferences(str(path), options=DataOptions(stage_split="0,100,0", stage="reward")).skipped == {}


def test_a_prompt_is_in_one_stage_whatever_its_dress(tmp_path):
    """The same prompts as text, as messages, as whole conversations, as prompts for PPO, and in a shuffled file."""
    texts = [f"question {i}" for i in range(60)]

    def ask(text):
        return {"role": "user", "content": text}

    def say(text):
        return {"role": "assistant", "content": text}

    dresses = {
        "text": [{"prompt": f"{t} ", "chosen": "a", "rejected": "b"} for t in texts],
        "messages": [{"prompt": [ask(t)], "chosen": [say("c")], "rejected": [say("d")]} for t in reversed(texts)],
        "whole": [{"chosen": [ask(t), say("e")], "rejected": [ask(t), say("f")]} for t in texts],
        "system": [
            {"prompt": [{"role": "system", "content": f"v{i}"}, ask(t)], "chosen": "a", "rejected": "b"}
            for i, t in enumerate(texts)
        ],
        "turns": [
            {"prompt": t, **{side: [ask(t), say("well"), ask("go on"), say(side)] for side in ("chosen", "rejected")}}
            for t in texts
        ],
        "hh": [{side: f"\n\nHuman: {t}\n\nAssistant: {side}" for side in ("chosen", "rejected")} for t in texts],
    }
    options, found = DataOptions(stage_split=SPLIT, stage="ppo"), set()
    for name, rows in dresses.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps(r) for r in rows))
        pairs = load_preferences(str(path), options=options).pairs
        prompts = load_prompts(str(path), options=options).prompts
        for conversations in ([pair.prompt for pair in pairs], [prompt.messages for prompt in prompts]):
            asked = [next(m["content"] for m in messages if m["role"] == "user") for messages in conversations]
            found.add(frozenset(text.strip() for text in asked))
    assert len(found) == 1 and 0 < len(next(iter(found))) < 60


def test_stages_do_not_move_between_versions():
    """Frozen: a reward model and a policy may be trained by different versions."""
    keys = [prompt_key([{"role": "user", "content": f"question {i}"}]) for i in range(8)]
    assert keys[0] == '[["user", "question 0"]]'
    assert [stage_of(key, (0.2, 0.4, 0.4)) for key in keys] == [
        "ppo",
        "ppo",
        "sft",
        "ppo",
        "sft",
        "reward",
        "reward",
        "reward",
    ]


def test_a_command_reads_its_own_stage_unless_told():
    assert DataOptions().for_stage("ppo").stage is None
    assert DataOptions(stage_split=SPLIT).for_stage("ppo").stage == "ppo"
    assert DataOptions(stage_split=SPLIT, stage="sft").for_stage("ppo").stage == "sft"


def test_what_was_read_is_kept_by_role(tmp_path, files):
    loaded = load_preferences(files, options=DataOptions(dataset_weights=[0.5, 0.5]))
    record = DataRecord("training", "pairs", 19, loaded.sources, Counter({"pairs left out: x": 1}))
    write_records(tmp_path, [record])
    write_records(tmp_path, [DataRecord("calibration", "pairs", 1, [])])
    kept = json.loads((tmp_path / "data.json").read_text())
    assert kept["training"]["pairs"] == 19 and kept["training"]["fitted"] == {"pairs left out: x": 1}
    assert [source["rows"] for source in kept["training"]["sources"]] == [30, 10]
    assert kept["training"]["sources"][0]["kind"] == "preference, explicit prompt, standard"
    assert kept["calibration"] == {"pairs": 1, "sources": [], "fitted": {}}
    assert str(record).splitlines()[0] == "Training pairs: 19" and "1 pairs left out: x" in str(record)
