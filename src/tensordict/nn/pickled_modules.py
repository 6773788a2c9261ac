"""Convert the attributes of modules that the reference package pickled; used by `__setstate__` of the modules."""

from __future__ import annotations

import pickle
import sys
from typing import Any

from tensordict.core import torch_internals as internals
from tensordict.core.exceptions import SaveError
from tensordict.core.extras import require

# Attributes of the reference that are dropped, because they follow from others, or hold modules a second time.
_FOLLOWING = ("_complete_out_keys", "_ordered_dict", "_det_part", "_dist", "_generator_key")
_ONLY_THERE = (*_FOLLOWING, "_trigger_warning_lpk")


class _OutKeysSelect:
    """Unpickles the hook that the reference registers in `select_out_keys`. Only its presence matters."""


def convert_state(state: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Convert a pickled state of a module of the reference. A state that this package pickled stays unchanged.

    Returns:
        The state, and whether out-keys were selected, so that the hook must be registered.
    """
    state = {name: value for name, value in state.items() if name not in _ONLY_THERE}
    hooks = state.get("_forward_hooks") or {}
    selecting = [number for number, hook in hooks.items() if type(hook) is _OutKeysSelect]
    for number in selecting:
        for name in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
            state.get(name, {}).pop(number, None)
    if "_selecting" not in state and state.get("_out_keys_apparent") == state.get("_out_keys"):
        # In the reference, this attribute lists all keys if none were selected.
        state.pop("_out_keys_apparent", None)
    if state.get("_get_kwargs") == {}:
        state["_get_kwargs"] = None
    if type(state.get("dist_keys")) is list:
        state["dist_keys"] = tuple(state["dist_keys"])
        if not state.get("_composite_lp_aggreate_at_init"):
            state["_log_prob_key"] = None
    if type(state.get("module")) is bytes:
        state["module"] = _load_function(state["module"])
    return state, bool(selecting)


def _load_function(content: bytes) -> object:
    """Unpickle the wrapped function, which the reference stores as a nested pickle of cloudpickle."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == internals.WEIGHTS_ONLY:
            raise SaveError(
                "the module wraps a function, which is stored as a separate pickle: loading it needs weights_only=False"
            )
        frame = frame.f_back
    try:
        return pickle.loads(content)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("cloudpickle"):
            require("cloudpickle", "cloudpickle")
        raise
