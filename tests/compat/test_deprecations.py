"""Deprecations agree with the reference: the same warning category, in the same calls only."""

from __future__ import annotations

import json
import warnings

import pytest

from reference import Reference

# One call a line. Of everything public in 0.14.3 only `copy_at_(fast=None)` warns that it is deprecated; the rest are
# calls that earlier versions deprecated, options whose default has changed, and settings that silence warnings.
CALLS = """\
data().copy_at_(data()[0], 0, fast=None)
data().copy_at_(data()[:2], torch.tensor([0, 1]), fast=None)
lazy_stack([data(), data()]).copy_at_(data(), 0, fast=None)
data().copy_at_(data()[0], 0)
data().copy_at_(data()[0], 0, fast=False)
data().update_at_(data()[0], 0)
data().get("missing")
data().set("words", ["a", "b", "c"])
data().view(3, 1)
data().to_dict(retain_none=True)
TensorDict.from_dict({"obs": torch.zeros(3)})
TensorDict.from_any({"obs": torch.zeros(3)})
TensorDict.from_module(linear, use_state_dict=True)
torch.stack([data(), data()])
lazy_stack([data(), data()]).densify()
tensordict.lazy_legacy()
tensordict.set_lazy_legacy(True)
tensordict.get_defaults_to_none()
tensordict.set_list_to_stack(False)
tensordict.capture_non_tensor_stack()
nn.composite_lp_aggregate()
nn.set_composite_lp_aggregate(True)
nn.set_skip_existing(True)
nn.ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=Normal, return_log_prob=True)
nn.TensorDictModule(linear, in_keys={"input": "obs"}, out_keys=["action"])
nn.TensorDictModule(linear, in_keys={"obs": "input"}, out_keys=["action"], out_to_in_map=True)
nn.set_interaction_type("mode")"""

PROGRAM = """
import json, sys, warnings
import torch
from torch.distributions import Normal
import tensordict
from tensordict import TensorDict, lazy_stack, nn

linear = torch.nn.Linear(4, 2)
found = {}

def data():
    return TensorDict({"obs": torch.zeros(3, 4), "meta": {"reward": torch.zeros(3)}}, batch_size=[3])

for call in calls.splitlines():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eval(call)
    found[call] = sorted({warning.category.__name__ for warning in caught})
"""
EXPECTED = {call: ["FutureWarning"] if "fast=None" in call else [] for call in CALLS.splitlines()}


def test_what_is_deprecated_here() -> None:
    names: dict[str, object] = {"calls": CALLS}
    exec(PROGRAM, names)
    assert names["found"] == EXPECTED


@pytest.mark.reference
def test_what_the_reference_deprecates(behaviour: Reference) -> None:
    found = json.loads(behaviour.run(f"calls = {CALLS!r}\n{PROGRAM}\nprint(json.dumps(found))"))
    assert found == EXPECTED


def test_the_warning_points_at_the_caller_and_says_what_to_write() -> None:
    names: dict[str, object] = {"calls": ""}
    exec(PROGRAM, names)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names["data"]().copy_at_(names["data"]()[0], 0, fast=None)  # type: ignore[operator]
    assert [warning.filename for warning in caught] == [__file__]
    assert "leave fast= out" in str(caught[0].message)
