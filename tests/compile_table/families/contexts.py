"""Blocks: views written back, locks, settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compile_table.forms import MAIN, NESTED, Form
from tensordict import (
    get_defaults_to_none,
    lazy_legacy,
    lazy_stack,
    set_capture_non_tensor_stack,
    set_lazy_legacy,
    set_list_to_stack,
)
from tensordict.nn import InteractionType, set_composite_lp_aggregate, set_interaction_type, set_skip_existing

VIEWS: dict[str, Callable[[Any], Any]] = {
    "view": lambda td: td.view(-1),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "transpose": lambda td: td.transpose(0, 1),
    "permute": lambda td: td.permute(1, 0),
    "flatten": lambda td: td.flatten(0, 1),
    "unflatten": lambda td: td.unflatten(0, (2, -1)),
}


def write_through(view: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def block(td: Any) -> Any:
        with view(td) as other:
            other.set("z", other.get("a") * 2)
        return td

    return block


def replace_through(view: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def block(td: Any) -> Any:
        with view(td) as other:
            other.set("a", other.get("a") * 2)
        return td

    return block


def flat_keys(td: Any) -> Any:
    with td.flatten_keys(".") as flat:
        flat.set("z", flat.get("a") * 2)
    return td


def nested_keys(td: Any) -> Any:
    flat = td.flatten_keys(".")
    with flat.unflatten_keys(".") as nested:
        nested.set("z", nested.get("a") * 2)
    return flat


def unlocked(td: Any) -> Any:
    with td.unlock_():
        td.set("z", td.get("a") * 2)
    return td


def locked(td: Any) -> Any:
    with td.lock_():
        result = td.get("a") * 2
    return result, td.is_locked


def on_device(td: Any) -> Any:
    with torch.device("cpu"):
        return td.new_zeros(2)


def without_gradients(td: Any) -> Any:
    with torch.no_grad():
        return td * 2


def inference(td: Any) -> Any:
    with torch.inference_mode():
        return (td * 2).get("a").sum()


def with_setting(setting: Callable[[], Any], call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def block(td: Any) -> Any:
        with setting():
            return call(td)

    return block


FORMS = [
    *(
        Form(f"with: {name}", write_through(view), (*MAIN, "inside"), quick="nested" if name == "view" else None)
        for name, view in VIEWS.items()
    ),
    *(Form(f"with: {name}, replaced", replace_through(view), MAIN) for name, view in VIEWS.items()),
    Form("with: flatten_keys", flat_keys, ("nested", "lazy")),
    Form("with: unflatten_keys", nested_keys, ("nested", "lazy")),
    Form("with: unlock_", unlocked, ("locked", *MAIN), quick="locked"),
    Form("with: lock_", locked, MAIN),
    Form("with: device", on_device, NESTED),
    Form("with: no_grad", without_gradients, (*MAIN, "params")),
    Form("with: inference_mode", inference, NESTED),
    Form(
        "with: set_lazy_legacy",
        with_setting(lambda: set_lazy_legacy(True), lambda td: torch.stack([td, td]).get("a")),
        NESTED,
    ),
    Form(
        "with: set_lazy_legacy, views",
        with_setting(lambda: set_lazy_legacy(True), lambda td: td.view(-1).get("a")),
        NESTED,
    ),
    Form("with: lazy_legacy", lambda td: lazy_legacy(), NESTED),
    Form("with: get_defaults_to_none", lambda td: get_defaults_to_none(), NESTED),
    Form(
        "with: set_list_to_stack",
        with_setting(lambda: set_list_to_stack(True), lambda td: td[0, 0].set("l", ["x", "y"])),
        NESTED,
    ),
    Form(
        "with: set_capture_non_tensor_stack",
        with_setting(lambda: set_capture_non_tensor_stack(False), lambda td: lazy_stack([td, td])["text"]),
        ("values",),
    ),
    Form(
        "with: set_interaction_type",
        with_setting(lambda: set_interaction_type(InteractionType.MEAN), lambda td: td * 2),
        NESTED,
    ),
    Form("with: set_skip_existing", with_setting(lambda: set_skip_existing(True), lambda td: td * 2), NESTED),
    Form(
        "with: set_composite_lp_aggregate",
        with_setting(lambda: set_composite_lp_aggregate(False), lambda td: td * 2),
        NESTED,
    ),
]
