"""`--push_to_hub`: the finished reward-model directory on the hub."""

from pathlib import Path
from typing import Any

from transformers import TrainingArguments

# Training states, tracker files, and the text of the data, which is its owner's to publish.
_NOT_PUSHED = ["checkpoint-*", "checkpoint-*/**", "runs/**", "scored_pairs/**", "*.partial"]


def claim_repository(args: TrainingArguments) -> str:
    """Create the repository, or find it, before the work begins, and return its full name.

    Raises:
        ValueError: the hub does not let us.
    """
    assert args.output_dir is not None
    name = args.hub_model_id or Path(args.output_dir).resolve().name
    try:
        created = _api(args).create_repo(name, private=args.hub_private_repo, exist_ok=True)
    except Exception as error:  # the hub's errors are many; each means that nothing can be pushed
        raise ValueError(
            f"--push_to_hub true: the hub gives no repository '{name}' ({str(error).splitlines()[0]}). Log in with "
            "`hf auth login` or pass --hub_token; name the repository with --hub_model_id USER/NAME."
        ) from None
    return created.repo_id


def push(directory: Path, repository: str, args: TrainingArguments) -> str:
    """Upload everything but training checkpoints and scored pairs; return the address.

    Raises:
        ValueError: the upload failed; what was trained lies in `directory`.
    """
    try:
        commit = _api(args).upload_folder(
            repo_id=repository,
            folder_path=directory,
            ignore_patterns=_NOT_PUSHED,
            commit_message="Upload a segment reward model",
        )
    except Exception as error:
        raise ValueError(
            f"the reward model is whole in {directory}, but pushing it to '{repository}' failed: "
            f"{str(error).splitlines()[0]}. Try `hf upload {repository} {directory}`."
        ) from error
    return commit.repo_url if hasattr(commit, "repo_url") else repository


def _api(args: TrainingArguments) -> Any:
    from huggingface_hub import HfApi

    return HfApi(token=args.hub_token)
