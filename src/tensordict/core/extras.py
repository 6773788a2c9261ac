"""Import optional dependencies; if one is missing, the error names the extra to install."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, extra: str) -> Any:
    """Import an optional dependency and return the module.

    Args:
        module: its import name.
        extra: the extra of this package that installs it.

    Raises:
        ModuleNotFoundError: it is not installed. The message contains the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"this needs the package {module.partition('.')[0]!r}: pip install 'tensordict[{extra}]'", name=module
        ) from None
