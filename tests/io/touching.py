"""Reads all that is in HDF5 files, so that a crash of the HDF5 library ends this process. See test_fuzz.py.

Reads a path a line, and answers each with a line: what became of it. Nothing is answered when it crashes.
"""

from __future__ import annotations

import faulthandler
import resource
import sys
import warnings
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDict, is_non_tensor, is_tensor_collection, verify
from tensordict.core.exceptions import UnsupportedEntryError

# A size that is made up must not be an amount of memory that this machine has to find.
MEMORY = 8 << 30


def touch(container: Any) -> int:
    """Read every tensor and every value; how many there were."""
    repr(container)
    if isinstance(container, LazyStackedTensorDict):
        return sum(touch(member) for member in container.tensordicts)
    if is_non_tensor(container):
        container.tolist()
        return 1
    count = 0
    for name in list(container.keys()):
        try:
            value = container.get(name)
            if is_tensor_collection(value):
                count += touch(value)
            else:
                value.clone()
                count += 1
        except (OSError, UnsupportedEntryError):
            continue
    return count


def outcome(path: str) -> str:
    try:
        with TensorDict.from_h5(path) as data:
            count = touch(data)
    except OSError:
        found = "refused"
    else:
        found = f"read {count}"
    sound = verify(path, raises=False).ok
    return f"{found}, {'sound' if sound else 'broken'}"


def main() -> None:
    faulthandler.disable()
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for line in sys.stdin:
        try:
            answer = outcome(line.rstrip("\n"))
        except Exception as error:
            answer = f"error: {type(error).__name__}: {error}".replace("\n", " ")
        print(answer, flush=True)


if __name__ == "__main__":
    main()
