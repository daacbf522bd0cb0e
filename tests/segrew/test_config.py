"""One parser for files and flags: precedence, numbers, booleans, null, and errors that name what is wrong."""

import ast
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch

from policy.ppo_config import PPOConfig
from reward_models.train_config import RewardModelConfig, RewardTrainingArguments
from segrew.config import arg, parse, read_yaml, to_dict
from segrew.data_options import DataOptions

ROOT = Path(__file__).parents[2]
TRAIN = (RewardModelConfig, RewardTrainingArguments)
COMMANDS = {"ppo": (PPOConfig, DataOptions), "train_rm": (*TRAIN, DataOptions)}


@dataclass
class Toy:
    learning_rate: float = arg(0.5, help="A rate, 10 % of something.")
    threshold: float | None = arg(1.0, help="A threshold.")
    kind: Literal["mean", "sum"] = arg("mean", help="A choice.")
    enabled: bool = arg(False, help="A switch.")
    shuffled: bool = arg(True, help="A switch that is on.")
    name: str = arg("toy", help="A name.")
    ids: list[int] = arg([], help="Numbers.")
    max_pairs: int | None = arg(None, help="A count.")


@pytest.fixture
def toy(tmp_path):
    def build(text: str | None = None, *argv: str) -> Toy:
        if text is not None:
            (tmp_path / "toy.yaml").write_text(text)
            argv = ("--config", str(tmp_path / "toy.yaml"), *argv)
        return parse("toy", (Toy,), list(argv))[0]

    return build


def test_flags_win_over_the_file_and_the_file_over_defaults(toy):
    config = toy("name: file\nlearning_rate: 0.25\n", "--name", "flag")
    assert (config.name, config.learning_rate, config.kind) == ("flag", 0.25, "mean")
    assert toy().name == "toy"


def test_the_config_flag_may_stand_anywhere_and_take_an_equals_sign(toy, tmp_path):
    (tmp_path / "a.yaml").write_text("name: file\n")
    for words in (
        ["--enabled", "true", "--config", f"{tmp_path}/a.yaml"],
        [f"--config={tmp_path}/a.yaml", "--enabled", "true"],
    ):
        config = toy(None, *words)
        assert config.name == "file" and config.enabled
    with pytest.raises(ValueError, match="--config needs a file name"):
        toy(None, "--enabled", "true", "--config")


@pytest.mark.parametrize("text, value", [("2e-5", 2e-5), ("1e5", 1e5), ("1e-5", 1e-5), (".5e-3", 0.0005), ("3", 3.0)])
def test_b40_numbers_of_a_file_are_numbers(toy, text, value):
    for config in (toy(f"learning_rate: {text}\n"), toy(None, "--learning_rate", text)):
        assert isinstance(config.learning_rate, float) and config.learning_rate == value


@pytest.mark.parametrize("text", ["-1.5", "-2e-3", "-1"])
def test_a_negative_number_of_a_file_is_no_flag(toy, text):
    assert toy(f"threshold: {text}\n").threshold == float(text)


@pytest.mark.parametrize("text", ["fast", "nan", "-1", "inf", ".nan", "-1e-9"])
def test_b40_a_bad_learning_rate_names_key_and_value(toy, text):
    for words in ((f"learning_rate: {text}\n",), (None, f"--learning_rate={text.lstrip('.')}")):
        with pytest.raises(ValueError, match="learning_rate") as error:
            toy(*words)
        assert text.lstrip(".").split("e")[0] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("word", ["false", "False", "0", "no"])
def test_b40_words_for_false_are_false(toy, word):
    for config in (toy(f"shuffled: {word}\n"), toy(None, "--shuffled", word)):
        assert config.shuffled is False
    args = parse("train-rm", TRAIN, ["--bf16", word])[1]
    assert args.bf16 is False


@pytest.mark.parametrize("word", ["true", "True", "1", "yes"])
def test_words_for_true_are_true(toy, word):
    for config in (toy(f"enabled: {word}\n"), toy(None, "--enabled", word), toy(None, "--enabled")):
        assert config.enabled is True


def test_a_boolean_whose_default_is_computed_keeps_it(monkeypatch):
    for fast in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda fast=fast: fast)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
        args = parse("train-rm", TRAIN, [])[1]
        assert args.bf16 is fast and args.use_cpu is True and args.dataloader_pin_memory is False


def test_b40_another_word_is_no_boolean(toy):
    for words in (("enabled: maybe\n",), (None, "--enabled", "maybe")):
        with pytest.raises(ValueError, match="maybe"):
            toy(*words)


def test_b40_an_unknown_key_names_the_nearest_known_one(toy):
    for words in (("learning_ratee: 1\n",), (None, "--learning_ratee", "1")):
        with pytest.raises(ValueError, match=r"unknown setting 'learning_ratee'; did you mean 'learning_rate'\?"):
            toy(*words)
    with pytest.raises(ValueError, match=r"unknown setting '7'"):
        toy("7: 8\n")


def test_b40_a_key_given_twice_is_refused_with_its_line(toy):
    with pytest.raises(ValueError, match="the key 'name' is given twice"):
        toy("name: a\nenabled: true\nname: b\n")


def test_no_abbreviations(toy):
    with pytest.raises(ValueError, match="unknown setting 'thresh'"):
        toy(None, "--thresh", "2")


def test_null_turns_a_setting_off_in_file_and_flags(toy):
    assert toy("threshold: null\n").threshold is None
    assert toy(None, "--threshold", "null").threshold is None
    assert toy("threshold: 2\n", "--threshold", "null").threshold is None
    assert toy("threshold: null\n", "--threshold", "2").threshold == 2.0
    assert toy("threshold:\n").threshold is None
    for words in (("name: null\n",), (None, "--name", "null")):
        with pytest.raises(ValueError, match="--name null: this setting needs a value"):
            toy(*words)


def test_the_evaluation_split_can_be_turned_off():
    assert parse("train-rm", TRAIN, ["--dataset_test_split", "null"])[0].dataset_test_split is None


def test_lists_and_mappings(toy, tmp_path):
    assert toy("ids: [3, 4]\n").ids == [3, 4] == toy(None, "--ids", "3", "4").ids
    (tmp_path / "b.yaml").write_text("activation_checkpointing_kwargs: {use_reentrant: false}\n")
    args = parse("train-rm", TRAIN, ["--config", str(tmp_path / "b.yaml")])[1]
    assert args.activation_checkpointing_kwargs == {"use_reentrant": False}


def test_an_unknown_choice_lists_the_choices(toy):
    for words in (("kind: median\n",), (None, "--kind", "median")):
        with pytest.raises(ValueError, match=r"kind.*median.*mean.*sum"):
            toy(*words)


@pytest.mark.parametrize("value", ["0", "-3"])
def test_a_count_is_at_least_one(toy, value):
    with pytest.raises(ValueError, match=f"--max_pairs {value}: must be at least 1"):
        toy(None, "--max_pairs", value)
    for name in ("--per_device_eval_batch_size", "--max_tokens_per_batch"):
        with pytest.raises(ValueError, match=name):
            parse("train-rm", TRAIN, [name, value])


@pytest.mark.parametrize("content", [b"- a\n- b\n", b"just text\n", b"", b"a: [\n", b"\xff\xfe\x00a", b"a: b: c\n"])
def test_a_file_that_is_no_mapping_is_refused_on_one_line(tmp_path, content):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"--config .*bad\.yaml") as error:
        read_yaml(path)
    assert "\n" not in str(error.value)


def test_a_missing_or_unreadable_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.yaml: no such file"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises((ValueError, OSError), match=tmp_path.name):
        read_yaml(tmp_path)


def test_help_shows_every_text_even_with_a_percent_sign(toy, capsys):
    with pytest.raises(SystemExit) as exit:
        toy(None, "--help")
    assert exit.value.code == 0 and "A rate, 10 % of something." in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_flag_once_under_headings_within_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(command, COMMANDS[command], ["--help"])
    shown = capsys.readouterr().out.splitlines()
    names = [line.split()[0][2:] for line in shown if line.startswith("  --")]
    known = [field.name for cls in COMMANDS[command] for field in dataclasses.fields(cls)]
    assert sorted(names) == sorted(known) and shown[0].startswith(f"usage: segrew {command} [--config")
    assert max(map(len, (line for line in shown if line.startswith(" ")))) <= 80
    headings = [line for line in shown if line.endswith(":") and line[0] != " "]
    if command == "ppo":
        own = ["Models and rewards", "Prompts", "The run", "The two axes", "Rollouts", "PPO", "Optimizer"]
        assert headings[:7] == [f"{heading}:" for heading in own] and headings[-1].startswith("How rows are read")
        assert names.index("cliprange") < names.index("learning_rate") < names.index("code_timeout")


def test_resolved_settings_are_plain_data():
    config, args = parse("train-rm", TRAIN, ["--learning_rate", "1e-5", "--rule", "token"])
    record = to_dict(config, args)
    assert record["learning_rate"] == 1e-5 and record["rule"] == "token" and record["quantile"] is None


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_loads_with_its_command(path):
    classes = next(classes for command, classes in COMMANDS.items() if path.stem.startswith(command))
    loaded = to_dict(*parse("test", classes, ["--config", str(path), "--seed", "5"]))
    assert loaded["seed"] == 5
    for name, value in read_yaml(path).items():
        value = float(value) if isinstance(loaded[name], float) else value
        assert loaded[name] in (value, [value]), name  # a single data set may stand without brackets


def configs_of_sources() -> dict[str, tuple[ast.ClassDef, list[str]]]:
    """Every class whose fields are made by `arg`, with the names of those fields."""
    found = {}
    for floor in ("segrew", "reward_models", "policy"):
        for path in (ROOT / floor).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not any(
                    "TrainingArguments" in ast.unparse(b) for b in node.bases
                ):
                    fields = [
                        item.target.id
                        for item in node.body
                        if isinstance(item, ast.AnnAssign) and isinstance(item.value, ast.Call)
                        and ast.unparse(item.value.func) == "arg"
                    ]  # fmt: skip
                    if fields:
                        found[node.name] = (node, fields)
    return found


def test_every_field_of_every_config_is_read():
    """Read as `config.x`, `self.x`, … anywhere but in the check of values, which is no use of them."""
    read = set()
    for floor in ("segrew", "reward_models", "policy"):
        for path in (ROOT / floor).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            checks = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__post_init__"]
            inside = {id(node) for check in checks for node in ast.walk(check)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in inside:
                    owner = ast.unparse(node.value).split(".")[-1]
                    if owner in ("config", "self", "output", "args", "settings", "options", "execution"):
                        read.add(node.attr)
    configs = configs_of_sources()
    assert {"RewardModelConfig", "PPOConfig", "ScoreConfig", "SegmentConfig", "DataConfig", "DataOptions"} <= set(
        configs
    )
    unread = {name: sorted(set(fields) - read) for name, (_, fields) in configs.items() if set(fields) - read}
    assert unread == {}


def test_a_stray_word_is_refused_by_name():
    with pytest.raises(ValueError, match=r"unexpected 'junk'"):
        parse("train-rm", TRAIN, ["--seed", "3", "junk"])


def test_a_list_for_a_single_value_is_refused_by_name(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: [1, 2]\n")
    with pytest.raises(ValueError, match="seed takes one value, found a list of 2"):
        parse("train-rm", TRAIN, ["--config", str(tmp_path / "a.yaml")])
