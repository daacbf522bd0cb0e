"""A run's directory: claimed once, never overwritten unasked, and readable after a kill."""

import json
import math
from functools import partial

import pytest

from segrew.run_directory import RUN_FILE, RunDirectory, read_json, read_jsonl, versions, write_json, write_jsonl


def create(path, **options):
    return RunDirectory.create(path, command="test", config={"rate": 1e-5}, **options)


def test_a_new_directory_records_what_was_asked(tmp_path):
    run = create(tmp_path / "a" / "b")
    record = read_json(run.path / RUN_FILE)
    assert record["command"] == "test" and record["config"] == {"rate": 1e-5}
    assert record["versions"] == versions() and record["versions"]["segrew"] != "not installed"
    assert set(record) == {"command", "config", "versions", "started"}


def test_an_empty_directory_may_be_claimed(tmp_path):
    assert (create(tmp_path).path / RUN_FILE).exists()


def test_another_run_is_refused_with_the_ways_out(tmp_path):
    create(tmp_path)
    with pytest.raises(ValueError, match=r"already holds a run; name a new directory, or replace .*--overwrite_output"):
        create(tmp_path)
    with pytest.raises(ValueError, match=r"already holds a run.*--resume_from_checkpoint.*--overwrite_output_dir"):
        create(tmp_path, resume=False)


def test_what_a_run_reads_is_not_overwritten_by_it(tmp_path):
    create(tmp_path / "a")
    (tmp_path / "a" / "model").mkdir()
    for value in (str(tmp_path / "a" / "model"), [str(tmp_path / "b"), str(tmp_path / "a")]):
        config = {"model_name_or_path": value, "output_dir": str(tmp_path / "a"), "seed": 1}
        for claim in (RunDirectory(tmp_path / "a").check, partial(RunDirectory.create, tmp_path / "a")):
            with pytest.raises(ValueError, match=r"--model_name_or_path .*would delete"):
                claim(command="test", config=config, overwrite=True)
    assert (tmp_path / "a" / "model").is_dir()


def test_a_run_of_another_command_is_not_resumed(tmp_path):
    create(tmp_path)
    for claim in (RunDirectory(tmp_path).check, partial(RunDirectory.create, tmp_path)):
        with pytest.raises(ValueError, match=r"holds a run of `segrew test`; `segrew other` cannot resume it"):
            claim(command="other", config={}, resume=True)


def test_overwriting_starts_from_nothing(tmp_path):
    (create(tmp_path).path / "old.txt").write_text("old")
    create(tmp_path, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == [RUN_FILE]


def test_resuming_keeps_everything_and_the_first_record(tmp_path):
    run = create(tmp_path)
    run.append("metrics.jsonl", {"step": 1})
    before = (tmp_path / RUN_FILE).read_text()
    RunDirectory.create(tmp_path, command="test", config={"rate": 2.0}, resume=True)
    assert (tmp_path / RUN_FILE).read_text() == before and read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1}]


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_files_of_others_are_left_alone(tmp_path, options):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds no run"):
        create(tmp_path, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        create(tmp_path / "x", overwrite=True)


def test_check_says_whether_a_run_is_there_and_writes_nothing(tmp_path):
    asked = {"command": "test", "config": {}}
    assert RunDirectory(tmp_path / "new").check(**asked) is False and not (tmp_path / "new").exists()
    create(tmp_path / "old")
    assert RunDirectory(tmp_path / "old").check(**asked, overwrite=True) is True
    with pytest.raises(ValueError, match="already holds a run"):
        RunDirectory(tmp_path / "old").check(**asked)


def test_json_round_trip_keeps_text_and_leaves_no_partial_file(tmp_path):
    content = {"text": "a🙂é\u2028", "numbers": [1, 2.5, None], "nested": {"x": True}}
    write_json(tmp_path / "a.json", content)
    write_jsonl(tmp_path / "b.jsonl", [content, {}])
    assert read_json(tmp_path / "a.json") == content
    assert read_jsonl(tmp_path / "b.jsonl") == [content, {}]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.jsonl"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "a.json", {"good": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"bad": object()})
    assert read_json(tmp_path / "a.json") == {"good": 1}


def test_broken_json_is_named(tmp_path):
    (tmp_path / "a.json").write_text('{"a": ')
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    for name, reason in (("a.json", "not valid JSON"), ("b.json", "not valid JSON"), ("c.json", "no such file")):
        with pytest.raises(ValueError, match=f"{name}: {reason}"):
            read_json(tmp_path / name)


def test_a_last_line_cut_by_a_kill_is_passed_over_but_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_jsonl(path)


def test_appended_rows_come_back_in_order(tmp_path):
    run = create(tmp_path)
    for step in range(3):
        run.append("metrics.jsonl", {"step": step, "loss": math.pi})
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["loss"] == math.pi
