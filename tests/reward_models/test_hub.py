"""`--push_to_hub` against a hub that only remembers what it was sent."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi

from segrew.run_directory import read_json


@pytest.fixture
def hub(monkeypatch):
    """Calls of the hub's client, in order; files as they lay in the folder at the time."""
    calls = []

    def create_repo(self, repo_id, **options):
        calls.append(("create", repo_id, self.token, options))
        return SimpleNamespace(repo_id=f"someone/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, **options):
        files = {str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()}
        calls.append(("upload", repo_id, files, options))
        return SimpleNamespace(repo_url=f"https://hub/{repo_id}")

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return calls


@pytest.mark.parametrize("tune", ["full", "head"])
def test_the_finished_directory_is_pushed_once(tmp_path, train, hub, tune):
    flags = {"tune": tune, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "dataset_test_split": "null"}
    train(tmp_path / "rm", push_to_hub=True, hub_token="secret", hub_private_repo=True, **flags)
    create, upload = hub
    assert create == ("create", "rm", "secret", {"private": True, "exist_ok": True})
    _, name, files, options = upload
    assert name == "someone/rm" and {"model.safetensors", "segrew.json", "README.md", "tokenizer.json"} <= files
    assert {"checkpoint-*/**", "scored_pairs/**"} <= set(options["ignore_patterns"])
    assert 'from_pretrained("someone/rm")' in (tmp_path / "rm" / "README.md").read_text()
    assert "secret" not in str(read_json(tmp_path / "rm" / "run.json"))


def test_a_hub_that_refuses_stops_before_the_work(tmp_path, train, monkeypatch):
    def refuse(self, *_, **__):
        raise RuntimeError("401 Unauthorized\nand more")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    with pytest.raises(ValueError, match=r"gives no repository 'me/rm' \(401 Unauthorized\).*--hub_token"):
        train(tmp_path / "rm", tune="head", push_to_hub=True, hub_model_id="me/rm")
    assert not (tmp_path / "rm").exists()


def test_a_failed_upload_says_where_the_model_is(tmp_path, train, hub, monkeypatch):
    def fail(self, **_):
        raise RuntimeError("connection lost")

    monkeypatch.setattr(HfApi, "upload_folder", fail)
    with pytest.raises(ValueError, match=r"the reward model is whole in .*connection lost.*hf upload someone/rm"):
        train(tmp_path / "rm", tune="head", push_to_hub=True, dataset_test_split="null")
    assert (tmp_path / "rm" / "model.safetensors").exists()
