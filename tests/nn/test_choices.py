"""The three settings of modules: blocks of the whole process, blocks of one thread, and what is left afterwards."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import distributions as D

from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
    choices,
    composite_lp_aggregate,
    interaction_type,
    set_composite_lp_aggregate,
    set_interaction_type,
    set_skip_existing,
    skip_existing,
)

RANDOM, MEAN = InteractionType.RANDOM, InteractionType.MEAN
# Each setting, the function that reads it, its first value, and two values of blocks.
SETTINGS = [
    pytest.param(set_interaction_type, interaction_type, None, RANDOM, MEAN, id="interaction"),
    pytest.param(set_skip_existing, skip_existing, False, True, ["a"], id="skipping"),
    pytest.param(set_composite_lp_aggregate, composite_lp_aggregate, False, True, False, id="aggregate"),
]
each_setting = pytest.mark.parametrize(("setting", "read", "first", "one", "two"), SETTINGS)


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@each_setting
def test_a_block_concerns_all_threads(setting, read, first, one, two):
    with setting(one):
        assert read() == in_thread(read) == one
        with setting(two):
            assert read() == in_thread(read) == two
        assert read() == in_thread(read) == one
    assert read() == in_thread(read) == first


@each_setting
def test_a_block_of_a_thread_concerns_no_other_one(setting, read, first, one, two):
    with setting(one, thread_local=True):
        assert (read(), in_thread(read)) == (one, first)
        with setting(two):
            # Blocks inside the block of a thread stay in the thread.
            assert (read(), in_thread(read)) == (two, first)
        assert (read(), in_thread(read)) == (one, first)

        def other():
            with setting(two):
                return read()

        assert in_thread(other) == two and read() == one
    assert read() == in_thread(read) == first
    with setting(one), setting(two, thread_local=True):
        assert (read(), in_thread(read)) == (two, one)
    with pytest.raises(TypeError, match="positional"):
        setting(one, "in_keys", "out_keys", True)


@each_setting
def test_one_object_opens_several_blocks(setting, read, first, one, two):
    for thread_local in (False, True):
        block = setting(one, thread_local=thread_local)
        with block, setting(two), block:
            assert read() == one
        assert read() == first


@pytest.mark.parametrize("setting", [set_interaction_type, set_composite_lp_aggregate])
def test_a_decorated_function_keeps_the_choice_in_its_thread(setting):
    read, one = (interaction_type, MEAN) if setting is set_interaction_type else (composite_lp_aggregate, True)

    @setting(one, thread_local=True)
    def decorated():
        return read(), in_thread(read)

    expected = (one, read())
    assert decorated() == decorated() == expected


def test_a_decorated_method_keeps_the_mode_in_its_thread():
    seen = []

    class Module:
        in_keys = ()
        out_keys = ("y",)

        @set_skip_existing(True, thread_local=True)
        def forward(self, tensordict):
            seen.append((skip_existing(), in_thread(skip_existing)))
            return tensordict.set("y", 2)

    assert Module().forward(TensorDict())["y"] == 2
    assert Module().forward(TensorDict(y=1))["y"] == 1
    assert seen == [(True, False)]


def test_set_and_unset_in_the_block_of_a_thread():
    choice = set_composite_lp_aggregate(True)
    with set_composite_lp_aggregate(False, thread_local=True):
        choice.set()
        assert composite_lp_aggregate() and not in_thread(composite_lp_aggregate)
        choice.unset()
        assert not composite_lp_aggregate()
        choice.set()
    assert not composite_lp_aggregate()


def test_no_choice_is_no_sum():
    with set_composite_lp_aggregate(True), set_composite_lp_aggregate(None):
        assert composite_lp_aggregate() is False
        draw = ProbabilisticTensorDictModule(["loc", "scale"], ["a"], distribution_class=D.Normal, return_log_prob=True)
        assert draw.log_prob_keys == ["a_log_prob"]
    with set_composite_lp_aggregate(1):
        assert composite_lp_aggregate() is True
    with set_interaction_type(RANDOM), set_interaction_type(None):
        assert interaction_type() is None


def test_a_list_of_keys_skips_modules_that_write_no_others():
    one, two = (TensorDictModule(lambda x: x + 1, ["x"], [key]) for key in ("y", ("n", "z")))
    net = TensorDictSequential(one, two)
    zeros = TensorDict({"x": torch.zeros(()), "y": torch.zeros(()), ("n", "z"): torch.zeros(())})
    with set_skip_existing(["y"]):
        result = net(zeros.copy())
    assert (result["y"], result["n", "z"]) == (0, 1)
    with set_skip_existing(["y", ("n", ("z",))]):
        result = net(zeros.copy())
    assert (result["y"], result["n", "z"]) == (0, 0)
    assert choices.Choice(3).get() == 3


def test_interaction_types_by_name_in_any_case():
    assert InteractionType("RANDOM") is InteractionType.from_str("Random") is RANDOM
    for wrong in (3, "bogus", "BOGUS"):
        with pytest.raises(ValueError, match="is not a valid InteractionType"):
            set_interaction_type(wrong)
