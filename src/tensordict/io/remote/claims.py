"""Claims: a saver keeps a file at the URL that it saves to, so that another saver is told and changes nothing.

Object stores have no locks, and a claim does not end with its process. A saver that is killed leaves it behind. Only a
person can tell whether that saver still runs somewhere, so the claim stays until somebody deletes it.
"""

from __future__ import annotations

import os
import secrets

from tensordict.core.exceptions import SaveError
from tensordict.core.locks import Lock
from tensordict.io.remote.urls import Remote
from tensordict.io.saving.commit import JOURNAL

# The process, the URL and the options of a claim. A forked process has no claims of its own.
_Key = tuple[int, str, str]
_lock = Lock()
# The claims of this process, and the content of claims that it failed to delete.
_held: set[_Key] = set()
_left: dict[_Key, bytes] = {}


class Claim:
    """The right to save to a URL, from when this is made until `release`.

    Stores with conditional uploads (S3, GCS) give it to one of several savers. On other stores the claim is read back,
    and two savers that begin in the same instant may both have it.

    Args:
        remote: where to save.

    Raises:
        SaveError: another saver has the claim.
        OSError: the store cannot be reached.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._key = os.getpid(), remote.url, repr(sorted(remote.storage_options.items()))
        with _lock.held:
            if self._key in _held:
                raise self._refusal()
            _held.add(self._key)
        self._content = _left.pop(self._key, b"") or secrets.token_hex(16).encode()
        try:
            # A store without conditional uploads would overwrite the claim of another saver.
            is_taken = self._read() not in (None, self._content) or not self._upload()
        except BaseException:
            # The upload may have arrived all the same.
            _left[self._key] = self._content
            _held.discard(self._key)
            raise
        if is_taken:
            _held.discard(self._key)
            raise self._refusal()

    def _upload(self) -> bool:
        """Upload the claim; returns whether it is this one that is there."""
        try:
            self._remote.put(JOURNAL, self._content, new=True)
        except FileExistsError:
            return False
        return self.is_valid()

    def _read(self) -> bytes | None:
        try:
            return self._remote.read(JOURNAL)
        except FileNotFoundError:
            return None

    def _refusal(self) -> SaveError:
        claim = self._remote.url_of(JOURNAL)
        return SaveError(
            f"another process or thread is saving to {self._remote.url!r}, or was killed while it did so: wait for it, "
            f"save elsewhere, or, if it no longer runs, delete {claim!r} and save again"
        )

    def is_valid(self) -> bool:
        """Return `False` when somebody has deleted or replaced the claim."""
        return self._read() == self._content

    def check(self) -> None:
        """Raise a `SaveError` when the claim was deleted."""
        if not self.is_valid():
            raise SaveError(
                f"somebody has deleted the claim {self._remote.url_of(JOURNAL)!r} while this process was saving there: "
                "the save is not complete"
            )

    def release(self) -> None:
        """Delete the claim, unless another saver has replaced it."""
        try:
            if self.is_valid():
                self._remote.delete([JOURNAL])
        except BaseException:
            # The next save of this process to the URL goes on with this claim.
            _left[self._key] = self._content
            raise
        finally:
            _held.discard(self._key)
