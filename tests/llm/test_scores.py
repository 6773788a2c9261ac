"""IFEvalScoreData: its fields, and every method that the page of the record lists (seeds/001), with its signature."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from tensordict import (
    MemoryMappedTensor,
    TensorClass,
    TensorDict,
    is_tensorclass,
    lazy_stack,
    load_memmap,
    maybe_dense_stack,
)
from tensordict.core.exceptions import FieldError, SaveError, StackError
from tensordict.llm import IFEvalScoreData

PROMPT_STRICT, INST_STRICT, PROMPT_LOOSE, INST_LOOSE = NAMES = (
    "prompt_level_strict_acc",
    "inst_level_strict_acc",
    "prompt_level_loose_acc",
    "inst_level_loose_acc",
)
# One prompt with two instructions: one is followed, the other one only when judged loosely.
VALUES = {
    PROMPT_STRICT: torch.tensor([0.0]),
    INST_STRICT: torch.tensor([1.0, 0.0]),
    PROMPT_LOOSE: torch.tensor([1.0]),
    INST_LOOSE: torch.tensor([1.0, 1.0]),
}


def record(instructions: int = 2) -> IFEvalScoreData:
    """The record of one prompt that follows all of its instructions loosely, and the first one strictly."""
    strict = torch.zeros(instructions)
    strict[0] = 1.0
    return IFEvalScoreData(torch.zeros(1), strict, torch.ones(1), torch.ones(instructions), batch_size=[])


def batch() -> IFEvalScoreData:
    """The records of three prompts with two instructions each, all values different."""
    values = [torch.arange(3.0).unsqueeze(1), torch.arange(6.0).view(3, 2)]
    return IFEvalScoreData(*values, *(value + 10 for value in values), batch_size=[3])


def assert_same(one: Any, other: Any) -> None:
    assert sorted(one.keys()) == sorted(other.keys())
    for name in one.keys():
        torch.testing.assert_close(one.get(name), other.get(name), rtol=0, atol=0)


class TestFields:
    def test_is_a_tensorclass_of_four_optional_fields(self) -> None:
        assert is_tensorclass(IFEvalScoreData) and issubclass(IFEvalScoreData, TensorClass)
        parameters = inspect.signature(IFEvalScoreData).parameters
        assert list(parameters)[:7] == [*NAMES, "batch_size", "device", "names"]
        assert {parameters[name].annotation for name in NAMES} == {"torch.Tensor | None"}
        assert all(
            parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ("batch_size", "device", "names")
        )

    def test_fields_are_read_as_attributes(self) -> None:
        scores = IFEvalScoreData(**VALUES, batch_size=[])
        for name, value in VALUES.items():
            assert getattr(scores, name) is value

    @pytest.mark.parametrize("size", [[], [0], [3], [2, 3]])
    def test_missing_fields_are_zeros(self, size: list[int]) -> None:
        scores = IFEvalScoreData(prompt_level_strict_acc=torch.ones(*size, 1), batch_size=size)
        assert torch.equal(scores.prompt_level_strict_acc, torch.ones(*size, 1))
        for name in (INST_STRICT, PROMPT_LOOSE, INST_LOOSE):
            value = getattr(scores, name)
            assert value.dtype == torch.float32 and torch.equal(value, torch.zeros(*size, 1))

    def test_none_is_missing(self) -> None:
        scores = IFEvalScoreData(None, torch.ones(4), None, None, batch_size=[])
        assert torch.equal(scores.prompt_level_strict_acc, torch.zeros(1))
        assert torch.equal(scores.inst_level_strict_acc, torch.ones(4))

    @pytest.mark.parametrize("size", [[], [3], [2, 3]])
    def test_the_shape_of_the_batch_gains_a_dim(self, size: list[int]) -> None:
        scores = IFEvalScoreData(*(torch.full(size, float(place)) for place in range(4)), batch_size=size)
        for place, name in enumerate(NAMES):
            assert torch.equal(getattr(scores, name), torch.full((*size, 1), float(place)))

    def test_zeros_are_on_the_device(self) -> None:
        scores = IFEvalScoreData(batch_size=[2], device="meta")
        assert scores.device == torch.device("meta") and scores.prompt_level_strict_acc.device.type == "meta"

    def test_names(self) -> None:
        assert IFEvalScoreData(batch_size=[2], names=["prompt"])[:1].names == ["prompt"]

    def test_wrong_batch_size(self) -> None:
        with pytest.raises(RuntimeError, match=r"IFEvalScoreData: entry 'prompt_level_strict_acc'.*\[2, 1\]"):
            IFEvalScoreData(torch.zeros(2, 1), batch_size=[3])

    def test_unknown_field(self) -> None:
        with pytest.raises(TypeError, match="'accuracy', which is no field of IFEvalScoreData"):
            IFEvalScoreData(accuracy=torch.zeros(1), batch_size=[])  # type: ignore[call-arg]

    def test_different_numbers_of_instructions(self) -> None:
        scores = maybe_dense_stack([record(1), record(3)])
        assert type(scores) is IFEvalScoreData and scores.batch_size == (2,)
        assert scores.get_item_shape(INST_STRICT) == (2, -1)
        assert torch.equal(scores.prompt_level_loose_acc, torch.ones(2, 1))
        padded = scores.get(INST_STRICT, as_padded_tensor=True, padding_value=-1)
        assert padded.tolist() == [[1, -1, -1], [1, 0, 0]]
        assert [value.tolist() for value in scores.get(INST_STRICT, as_list=True)] == [[1], [1, 0, 0]]
        assert [len(value) for value in scores.get(INST_STRICT, as_nested_tensor=True).unbind()] == [1, 3]
        with pytest.raises(StackError, match="as_padded_tensor"):
            scores.inst_level_strict_acc  # noqa: B018

    def test_over_a_lazy_stack(self) -> None:
        scores = IFEvalScoreData.from_tensordict(lazy_stack([TensorDict({INST_STRICT: torch.ones(n)}) for n in (1, 2)]))
        assert scores.get_item_shape(INST_STRICT) == (2, -1)
        assert torch.equal(scores.inst_level_loose_acc, torch.zeros(2, 1))

    def test_pickle(self) -> None:
        assert_same(pickle.loads(pickle.dumps(batch())), batch())


class TestJoining:
    def test_cat(self) -> None:
        joined = IFEvalScoreData.cat([batch(), batch()], dim=0)
        assert type(joined) is IFEvalScoreData and joined.batch_size == (6,)
        assert torch.equal(joined.inst_level_loose_acc, torch.arange(6.0).view(3, 2).repeat(2, 1) + 10)
        out = IFEvalScoreData(
            torch.zeros(6, 1), torch.zeros(6, 2), torch.zeros(6, 1), torch.zeros(6, 2), batch_size=[6]
        )
        memory = out.inst_level_loose_acc
        assert IFEvalScoreData.cat([batch(), batch()], 0, out=out) is out
        assert torch.equal(memory, joined.inst_level_loose_acc)

    def test_stack(self) -> None:
        stacked = IFEvalScoreData.stack([batch(), batch()], dim=1)
        assert type(stacked) is IFEvalScoreData and stacked.batch_size == (3, 2)
        assert torch.equal(stacked.prompt_level_strict_acc[:, 1], batch().prompt_level_strict_acc)

    def test_lazy_stack(self) -> None:
        members = [record(1), record(2)]
        stacked = IFEvalScoreData.lazy_stack(members, dim=0)
        assert type(stacked) is IFEvalScoreData and stacked.batch_size == (2,)
        assert stacked[1].inst_level_strict_acc is members[1].inst_level_strict_acc

    def test_maybe_dense_stack(self) -> None:
        dense = IFEvalScoreData.maybe_dense_stack([record(2), record(2)], dim=0)
        assert type(dense) is IFEvalScoreData and torch.equal(dense.inst_level_loose_acc, torch.ones(2, 2))
        assert not hasattr(dense, "stack_dim")
        ragged = IFEvalScoreData.maybe_dense_stack([record(1), record(2)])
        assert type(ragged) is IFEvalScoreData and ragged.stack_dim == 0

    def test_unbind(self) -> None:
        scores = batch()
        parts = scores.unbind(0)
        assert isinstance(parts, tuple) and [type(part) for part in parts] == [IFEvalScoreData] * 3
        parts[1].inst_level_strict_acc.fill_(-1)
        assert scores.inst_level_strict_acc.tolist() == [[0, 1], [-1, -1], [4, 5]]


class TestReadingAndWriting:
    def test_fields(self) -> None:
        fields = IFEvalScoreData.fields()
        assert isinstance(fields, tuple) and all(isinstance(field, dataclasses.Field) for field in fields)
        assert [field.name for field in fields] == list(NAMES)

    def test_get(self) -> None:
        scores = IFEvalScoreData(**VALUES, batch_size=[])
        assert scores.get(INST_STRICT) is VALUES[INST_STRICT]
        assert scores.get((INST_STRICT,)) is VALUES[INST_STRICT]
        assert scores.get("nothing", "default") == "default"

    def test_set(self) -> None:
        scores = record()
        value, before = torch.ones(2), scores.inst_level_strict_acc
        assert scores.set(INST_STRICT, value) is scores and scores.inst_level_strict_acc is value
        assert scores.set(INST_STRICT, value=before, inplace=True, non_blocking=False) is scores
        assert scores.inst_level_strict_acc is value and torch.equal(value, before)
        with pytest.raises(FieldError, match="cannot set 'other', which is no field of IFEvalScoreData"):
            scores.set("other", value)

    def test_state_dict(self) -> None:
        state = batch().state_dict()
        assert sorted(state) == sorted(NAMES) and torch.equal(state[INST_STRICT], batch().inst_level_strict_acc)
        assert sorted(batch().state_dict(prefix="scores.", flatten=True)) == sorted(f"scores.{name}" for name in NAMES)
        assert batch().state_dict(flatten=False).keys() == state.keys()
        given: dict[str, Any] = {"first": 1}
        assert batch().state_dict(given) is given and len(given) == 5

    def test_load_state_dict(self) -> None:
        scores = IFEvalScoreData(
            torch.zeros(3, 1), torch.zeros(3, 2), torch.zeros(3, 1), torch.zeros(3, 2), batch_size=[3]
        )
        assert scores.load_state_dict(batch().state_dict()) is scores
        assert_same(scores, batch())
        state = batch().state_dict()
        del state[INST_STRICT]
        with pytest.raises(RuntimeError, match=INST_STRICT):
            scores.load_state_dict(state, strict=True)
        assert scores.load_state_dict(state, strict=False) is scores

    @pytest.mark.parametrize("retain_none", [None, True, False])
    def test_to_tensordict(self, retain_none: bool | None) -> None:
        scores = batch()
        plain = scores.to_tensordict(retain_none=retain_none)
        assert type(plain) is TensorDict and plain.batch_size == (3,)
        assert_same(plain, scores)
        assert plain[INST_STRICT].data_ptr() != scores.inst_level_strict_acc.data_ptr()

    def test_to_tensordict_of_a_field_that_was_deleted(self) -> None:
        scores = batch()
        del scores.inst_level_loose_acc
        assert INST_LOOSE not in scores.to_tensordict(retain_none=False)
        assert scores.to_tensordict(retain_none=True)[INST_LOOSE] is None


@dataclasses.dataclass
class Plain:
    """A dataclass with the fields of the record."""

    prompt_level_strict_acc: Any
    inst_level_strict_acc: Any
    prompt_level_loose_acc: Any
    inst_level_loose_acc: Any


Tuple = collections.namedtuple("Tuple", NAMES)


class TestConstructors:
    @pytest.mark.parametrize(
        "made",
        [
            pytest.param(lambda: IFEvalScoreData.from_any(VALUES), id="from_any"),
            pytest.param(lambda: IFEvalScoreData.from_dataclass(Plain(**VALUES)), id="from_dataclass"),
            pytest.param(lambda: IFEvalScoreData.from_namedtuple(Tuple(**VALUES)), id="from_namedtuple"),
            pytest.param(lambda: IFEvalScoreData.from_pytree(VALUES), id="from_pytree"),
            pytest.param(lambda: IFEvalScoreData.from_tensordict(TensorDict(VALUES)), id="from_tensordict"),
            pytest.param(lambda: IFEvalScoreData.from_dict(VALUES), id="from_dict"),
        ],
    )
    def test_from_other_structures(self, made: Callable[[], IFEvalScoreData]) -> None:
        scores = made()
        assert type(scores) is IFEvalScoreData and scores.batch_size == ()
        assert_same(scores, IFEvalScoreData(**VALUES, batch_size=[]))

    def test_from_any_with_a_batch_size(self) -> None:
        values = {name: value.repeat(3, 1) for name, value in VALUES.items()}
        for options in ({"batch_size": [3]}, {"auto_batch_size": True, "batch_dims": 1}):
            scores = IFEvalScoreData.from_any(values, **options)
            assert type(scores) is IFEvalScoreData and scores.batch_size == (3,)
        assert IFEvalScoreData.from_any(VALUES, device="meta").device == torch.device("meta")

    def test_from_dataclass_to_a_tensorclass(self) -> None:
        scores = IFEvalScoreData.from_dataclass(Plain(**VALUES), dest_cls=IFEvalScoreData, as_tensorclass=True)
        assert type(scores) is IFEvalScoreData
        assert_same(scores, IFEvalScoreData(**VALUES, batch_size=[]))

    def test_from_tuple_has_no_field_names(self) -> None:
        with pytest.raises(FieldError, match="'0'.*no field of IFEvalScoreData"):
            IFEvalScoreData.from_tuple(tuple(VALUES.values()))

    def test_from_struct_array(self) -> None:
        array = np.array([(1, 2, 3, 4), (5, 6, 7, 8)], dtype=[(name, "f4") for name in NAMES])
        scores = IFEvalScoreData.from_struct_array(array)
        assert type(scores) is IFEvalScoreData and scores.batch_size == (2,)
        assert scores.inst_level_strict_acc.tolist() == [[2], [6]]
        array[PROMPT_STRICT] += 1
        assert scores.prompt_level_strict_acc.tolist() == [[2], [6]]

    def test_fromkeys(self) -> None:
        scores = IFEvalScoreData.fromkeys([PROMPT_STRICT, INST_STRICT], 1)
        assert type(scores) is IFEvalScoreData
        assert scores.prompt_level_strict_acc.tolist() == [1] and scores.inst_level_loose_acc.tolist() == [0]
        with pytest.raises(FieldError, match="'other'"):
            IFEvalScoreData.fromkeys(["other"])

    def test_from_tensordict(self) -> None:
        source = TensorDict(dict(VALUES))
        assert IFEvalScoreData.from_tensordict(source).inst_level_strict_acc is VALUES[INST_STRICT]
        del source[INST_LOOSE]
        scores = IFEvalScoreData.from_tensordict(source, non_tensordict={INST_LOOSE: torch.ones(5)}, safe=True)
        assert torch.equal(scores.inst_level_loose_acc, torch.ones(5))
        with pytest.raises(FieldError, match="'reward'"):
            IFEvalScoreData.from_tensordict(TensorDict(reward=torch.zeros(1)))
        with pytest.raises(TypeError, match="needs a container, got dict"):
            IFEvalScoreData.from_tensordict(dict(VALUES))  # type: ignore[arg-type]

    def test_from_h5(self, tmp_path: pathlib.Path) -> None:
        with h5py.File(tmp_path / "scores.h5", "w") as file:
            for name, value in VALUES.items():
                file[name] = value.numpy()
        held = IFEvalScoreData.from_h5(tmp_path / "scores.h5", mode="r")
        assert_same(held, TensorDict(VALUES))

    def test_from_modules(self) -> None:
        modules = [torch.nn.Linear(3, 4) for _ in range(2)]
        params = IFEvalScoreData.from_modules(*modules, as_module=False, lock=True, use_state_dict=False)
        assert params.batch_size == (2,) and params.is_locked
        assert torch.equal(params["weight"][1], modules[1].weight)
        lazy = IFEvalScoreData.from_modules(*modules, lazy_stack=True, expand_identical=False)
        assert lazy[0]["bias"] is modules[0].bias


class TestOnDisk:
    @pytest.mark.parametrize("method", ["memmap", "memmap_", "save", "dumps"])
    def test_written_and_loaded(self, method: str, tmp_path: pathlib.Path) -> None:
        scores = batch()
        saved = getattr(scores, method)(
            tmp_path / "scores", copy_existing=False, num_threads=2, return_early=False, share_non_tensor=False
        )
        assert type(saved) is IFEvalScoreData and saved.is_memmap() and saved.is_locked
        assert (saved is scores) == (method == "memmap_")
        for loaded in (
            IFEvalScoreData.load(tmp_path / "scores"),
            IFEvalScoreData.load_memmap(tmp_path / "scores"),
            load_memmap(tmp_path / "scores"),
        ):
            assert type(loaded) is IFEvalScoreData and loaded.batch_size == (3,)
            assert isinstance(loaded.inst_level_strict_acc, MemoryMappedTensor)
            assert_same(loaded, batch())

    @pytest.mark.parametrize("method", ["memmap", "memmap_", "memmap_like"])
    def test_return_early_and_existsok(self, method: str, tmp_path: pathlib.Path) -> None:
        future = getattr(batch(), method)(tmp_path, num_threads=2, return_early=True)
        saved = future.result()
        assert type(saved) is IFEvalScoreData and saved.is_memmap()
        with pytest.raises(RuntimeError):
            getattr(batch(), method)(tmp_path, existsok=False)

    def test_ragged(self, tmp_path: pathlib.Path) -> None:
        lazy_stack([record(1), record(3)]).memmap(tmp_path)
        loaded = IFEvalScoreData.load_memmap(tmp_path)
        assert loaded.get(INST_LOOSE, as_padded_tensor=True).tolist() == [[1, 0, 0], [1, 1, 1]]

    def test_load_memmap_to(self, tmp_path: pathlib.Path) -> None:
        batch().memmap(tmp_path)
        meta = IFEvalScoreData.load_memmap(tmp_path, device="meta", non_blocking=False)
        assert meta.inst_level_strict_acc.is_meta and meta.inst_level_strict_acc.shape == (3, 2)
        out = IFEvalScoreData(
            torch.zeros(3, 1), torch.zeros(3, 2), torch.zeros(3, 1), torch.zeros(3, 2), batch_size=[3]
        )
        assert IFEvalScoreData.load_memmap(tmp_path, out=out) is out
        assert_same(out, batch())

    @pytest.mark.parametrize("method", ["load_", "load_memmap_"])
    def test_load_in_place(self, method: str, tmp_path: pathlib.Path) -> None:
        batch().memmap(tmp_path)
        scores = IFEvalScoreData(
            torch.zeros(3, 1), torch.zeros(3, 2), torch.zeros(3, 1), torch.zeros(3, 2), batch_size=[3]
        )
        assert getattr(scores, method)(tmp_path) is scores
        assert_same(scores, batch())

    def test_memmap_like(self, tmp_path: pathlib.Path) -> None:
        # The document's example allocates a data set from one element: here, of records that are filled one by one.
        buffer = record().expand(1_000).memmap_like(tmp_path, copy_existing=False, num_threads=0)
        assert type(buffer) is IFEvalScoreData and buffer.batch_size == (1_000,)
        buffer[7] = record()
        loaded = IFEvalScoreData.load_memmap(tmp_path)
        assert loaded[7].inst_level_loose_acc.tolist() == [1, 1]

    def test_memmap_refresh_(self, tmp_path: pathlib.Path) -> None:
        batch().memmap(tmp_path)
        reader = IFEvalScoreData.load_memmap(tmp_path)
        other = IFEvalScoreData(*(torch.full((3, 4), float(place)) for place in range(4)), batch_size=[3])
        other.memmap(tmp_path)
        reader.memmap_refresh_()
        assert reader.inst_level_loose_acc.shape == (3, 4)
        assert_same(reader, other)
        with pytest.raises(SaveError, match="memmap"):
            batch().memmap_refresh_()


# As the page gives them, where `cls`, what is converted and the path are left out.
FOUND = {"auto_batch_size": False, "batch_dims": None, "device": None, "batch_size": None}
WRITING = {"prefix": None, "copy_existing": False, "num_threads": 0, "return_early": False, "share_non_tensor": False}
SIGNATURES: dict[str, dict[str, Any]] = {
    "cat": {"dim": 0, "out": None},
    "dumps": WRITING,
    "from_any": FOUND,
    "from_dataclass": {"dest_cls": None, "as_tensorclass": False, **FOUND},
    "from_h5": {"mode": "r", "auto_batch_size": False, "batch_dims": None, "batch_size": None},
    # tests/parallel/test_distributed.py tests its behaviour.
    "from_remote_init": {"group": None, "device": None},
    "from_modules": {
        "as_module": False,
        "lock": True,
        "use_state_dict": False,
        "lazy_stack": False,
        "expand_identical": False,
    },
    "from_namedtuple": FOUND,
    "from_pytree": {"batch_size": None, "auto_batch_size": False, "batch_dims": None},
    "from_struct_array": FOUND,
    "from_tensordict": {"tensordict": inspect.Parameter.empty, "non_tensordict": None, "safe": True},
    "from_tuple": FOUND,
    "fromkeys": {"value": 0},
    "get": {"key": inspect.Parameter.empty},
    "lazy_stack": {"dim": 0, "out": None},
    "load_": {"prefix": inspect.Parameter.empty},
    "load_memmap": {"device": None, "non_blocking": False, "out": None},
    # The page has `flatten=False` and `from_flatten=False`, of an older level: the same for a record without nesting.
    "load_state_dict": {"state_dict": inspect.Parameter.empty, "strict": True, "assign": False, "from_flatten": None},
    "maybe_dense_stack": {"dim": 0, "out": None},
    "memmap": {**WRITING, "existsok": True},
    "memmap_": {**WRITING, "existsok": True},
    "memmap_like": {**WRITING, "existsok": True},
    "memmap_refresh_": {},
    "save": WRITING,
    "set": {"key": inspect.Parameter.empty, "value": inspect.Parameter.empty, "inplace": False, "non_blocking": False},
    "stack": {"dim": 0, "out": None},
    "state_dict": {"destination": None, "prefix": "", "keep_vars": False, "flatten": True},
    "to_tensordict": {"retain_none": None},
    "unbind": {"dim": inspect.Parameter.empty},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(IFEvalScoreData, name)).parameters
    for parameter, default in SIGNATURES[name].items():
        assert parameter in parameters, f"{name}() takes {list(parameters)}"
        if default is not inspect.Parameter.empty:
            assert parameters[parameter].default == default
