"""Uploading a model to the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from mpu_cli.checkpoint.reader import ADAPTER_CONFIG, INDEX
from mpu_cli.errors import MpuError, UsageError
from mpu_cli.models.source import SIDE_FILES

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")


def check_repository(name: str) -> None:
    """Make sure that the repository ``name`` exists, or make it, private. Raises UsageError for a name that is not
    OWNER/NAME, MpuError if the Hub cannot be reached or refuses."""
    if not _NAME.match(name):
        raise UsageError(f"--push {name}: expected OWNER/NAME")
    from huggingface_hub import create_repo
    from huggingface_hub.errors import HfHubHTTPError

    try:
        create_repo(name, private=True, exist_ok=True)
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise MpuError(f"--push {name}: {_first_line(error)}", "log in with hf auth login") from error


# What a model is made of. A result has every small file that lay beside its base, and that may be anything.
UPLOADED = [
    "*.safetensors", f"*.safetensors{INDEX}", "config.json", ADAPTER_CONFIG, "mpu.json", "README.md", "LICENSE*",
    "NOTICE*", "additional_chat_templates/*.jinja", *SIDE_FILES,
]  # fmt: skip


def upload(folder: Path, name: str) -> str:
    """Upload the files in ``folder`` to the repository ``name``; its address. Raises MpuError if that fails: the folder
    is complete all the same."""
    from huggingface_hub import upload_folder
    from huggingface_hub.errors import HfHubHTTPError

    try:
        commit = upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload by mpu aggregate", allow_patterns=UPLOADED
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise MpuError(
            f"{folder}: written, but not uploaded to {name} ({_first_line(error)})",
            f"upload it with hf upload {name} {folder}",
        ) from error
    return str(commit.repo_url)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
