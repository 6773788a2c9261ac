"""Data sets on the Hub of Hugging Face: `push_to_hub` and `load_dataset`."""

from __future__ import annotations

import os
from typing import Any

from tensordict.core.exceptions import SaveError
from tensordict.core.extras import require
from tensordict.datasets.dataset import Dataset, open_with_row_class
from tensordict.datasets.lines import SHARDS, WRITERS
from tensordict.io.remote.remote_saves import Access
from tensordict.memory.names import SCHEMA

# Nothing else in a folder or a repository is sent or fetched.
_PATTERNS = [SCHEMA, f"{SHARDS}/**", f"{WRITERS}/**"]
_KIND = "dataset"


def push_to_hub(
    data: Any,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload a data set of tensordict",
    token: str | bool | None = None,
) -> str:
    """Send a data set to a repository of data sets on the Hub of Hugging Face, in one commit.

    Its folder is sent as it is, so close the writers first: rows that they flush meanwhile may be left out. Files that
    are in the repository stay, and so do the rows that others have sent.

    Args:
        data: the result of :func:`open_dataset` of a local folder.
        repo_id: the repository, such as "user/name"; it is made if it does not exist.
        private: make a private repository; by default as the organization has it. No effect on one that exists.
        revision: the branch; by default "main".
        commit_message: the message of the commit.
        token: a token; by default the one of `hf auth login` or of the environment variable `HF_TOKEN`.

    Returns:
        the URL of the commit.

    Raises:
        ModuleNotFoundError: huggingface_hub is missing; the error names the extra.
        TypeError: `data` is not a data set.
        SaveError: the data set is at a URL.
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses; the error says why.

    `HF_ENDPOINT` names another Hub, as for all programs that use huggingface_hub.
    """
    found = data._wrapped_container() if hasattr(data, "_wrapped_container") else data
    if not isinstance(found, Dataset):
        raise TypeError(f"push_to_hub sends the result of open_dataset, got a {type(data).__name__}")
    if found._manifests.place.is_remote:
        raise SaveError(f"{found.path!r} is a URL, and the Hub is sent a local folder: copy the data set first")
    hub = require("huggingface_hub", "hf").HfApi(token=token)
    hub.create_repo(repo_id, private=private, repo_type=_KIND, exist_ok=True)
    commit = hub.upload_folder(
        repo_id=repo_id,
        repo_type=_KIND,
        folder_path=found.path,
        revision=revision,
        commit_message=commit_message,
        allow_patterns=_PATTERNS,
    )
    return str(commit.commit_url)


def load_dataset(
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Dataset:
    """Fetch a data set that :func:`push_to_hub` has sent to the Hub of Hugging Face, and open it for reading.

    The files of each commit have a folder of their own in `HF_HOME`, such as
    `~/.cache/huggingface/tensordict/user--name/COMMIT`. Files that are there are not fetched again.

    Args:
        repo_id: the repository, such as "user/name".
        revision: a branch, a tag or a commit; by default "main".
        token: as in :func:`push_to_hub`.

    Returns:
        the :class:`Dataset`, or a tensorclass over it, as :func:`open_dataset` does. Nothing that was fetched is run.

    Raises:
        ModuleNotFoundError: huggingface_hub is missing; the error names the extra.
        FileNotFoundError: the repository has no data set of this package.
        huggingface_hub.errors.HfHubHTTPError: there is no such repository or revision, or it may not be read.
        SaveError: the data set is broken.
    """
    library = require("huggingface_hub", "hf")
    hub = library.HfApi(token=token)
    # Pin the commit, so that all files are of one even if somebody pushes meanwhile.
    commit = hub.dataset_info(repo_id, revision=revision).sha
    if not str(commit).isalnum():
        raise SaveError(f"the Hub says that {repo_id!r} is at the commit {commit!r}, which is no name of one")
    home = require("huggingface_hub.constants", "hf").HF_HOME
    folder = os.path.join(home, "tensordict", repo_id.replace("/", "--"), commit)
    hub.snapshot_download(
        repo_id, repo_type=_KIND, revision=commit, local_dir=folder, allow_patterns=_PATTERNS, max_workers=4
    )
    data: Dataset = open_with_row_class(folder, "r", Access.of(None))
    return data
