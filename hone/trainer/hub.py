"""Uploads an exported model to the Hugging Face hub, or to the server in HF_ENDPOINT.

Only huggingface_hub reads the token, from HF_TOKEN or `hf auth login`.
"""

from __future__ import annotations

import os
from pathlib import Path

from hone.trainer.export import ExportError


def check_push(repo: str) -> None:
    """Raises an error if the repository's name, the hub's availability or the token prevent a push."""
    from huggingface_hub import get_token, is_offline_mode
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ExportError(f"--push {repo}: name it NAME or OWNER/NAME ({error})") from None
    if is_offline_mode():
        raise ExportError(f"--push {repo}: HF_HUB_OFFLINE is set; unset it to reach the hub")
    if get_token() is None:
        raise ExportError(f"--push {repo} needs a token: set HF_TOKEN, or run `hf auth login`")


def push(folder: Path, repo: str, *, private: bool = False) -> str:
    """Uploads a folder to a model repository, which is created if needed, and returns the URL."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    check_push(repo)
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="hone")
    retry_hint = f"the model is in {folder}, and `hf upload {repo} {folder}` tries again"
    try:
        repository = api.create_repo(repo, private=private or None, exist_ok=True)
        commit_message = "Model exported by hone"
        api.upload_folder(
            repo_id=repository.repo_id, folder_path=folder, commit_message=commit_message
        )
    except HfHubHTTPError as error:
        status = f"{error.response.status_code} {error.response.reason_phrase}"
        raise ExportError(
            f"--push {repo}: {api.endpoint} answered {status}; {retry_hint}"
        ) from None
    except (HTTPError, OSError) as error:
        raise ExportError(
            f"--push {repo}: {api.endpoint} cannot be reached ({error}); {retry_hint}"
        ) from None
    return str(repository)
