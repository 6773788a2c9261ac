"""Shape methods and `torch.stack` under `set_lazy_legacy(True)`; tests/contract has the rest."""

from __future__ import annotations

import pathlib
import pickle
import threading
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import Plain, batch_sizes, leaves, structures
from tensordict import LazyStackedTensorDict, LazyView, TensorDict, lazy_stack, load_memmap, set_lazy_legacy
from tensordict.core.exceptions import LockedError

Step = Callable[[Any], Any]


def make() -> TensorDict:
    return TensorDict(
        {
            "a": torch.arange(24.0).view(2, 3, 4),
            "n": {"x": torch.arange(6).view(2, 3)},
            "deep": TensorDict({"y": torch.arange(30).view(2, 3, 5)}, [2, 3, 5]),
        },
        [2, 3],
    )


def lazily(step: Step, td: Any) -> Any:
    with set_lazy_legacy(True):
        return step(td)


def unit(td: Any) -> Any:
    """With dims of size 1."""
    return td.reshape(1, 2, 1, 3)


def root(view: Any) -> Any:
    """The container that a chain of views leads to."""
    while isinstance(view, LazyView):
        view = view._source
    return view


STEPS: dict[str, Step] = {
    "view": lambda td: td.view(-1),
    "view-size": lambda td: td.view(size=(3, 2)),
    "permute": lambda td: td.permute(1, 0),
    "transpose": lambda td: td.transpose(-1, 0),
    "swapaxes": lambda td: td.swapaxes(0, 1),
    "movedim": lambda td: td.movedim(0, -1),
    "squeeze": lambda td: unit(td).squeeze(),
    "squeeze-dim": lambda td: unit(td).squeeze(2),
    "squeeze-dims": lambda td: unit(td).squeeze((0, -2)),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "unsqueeze-last": lambda td: td.unsqueeze(-1),
    "atleast": lambda td: td.atleast_3d(),
    "three-dims": lambda td: td.unsqueeze(0).permute(2, 0, 1),
    "torch-permute": lambda td: torch.permute(td, (1, 0)),
    "torch-unsqueeze": lambda td: torch.unsqueeze(td, 1),
}


@pytest.fixture(params=STEPS.values(), ids=STEPS.keys())
def step(request: pytest.FixtureRequest) -> Step:
    return request.param  # type: ignore[no-any-return]


def assert_equal(found: Any, expected: Any) -> None:
    """The same batch sizes, keys and elements, node by node."""
    assert found.batch_size == expected.batch_size and found.names == expected.names
    assert list(found.keys()) == list(expected.keys())
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[key], value, rtol=0, atol=0)
        else:
            assert_equal(found[key], value)


# --- reading and writing ----------------------------------------------------------------------------------------------


def test_off_by_default(step: Step) -> None:
    assert type(step(make())) is TensorDict


def test_reads_as_the_eager_result(step: Step) -> None:
    td = make()
    view = lazily(step, td)
    assert type(view) is LazyView and type(view["n"]) is LazyView
    assert not isinstance(view, TensorDict)
    assert_equal(view, step(td))
    assert view.device is None and view.is_contiguous() == step(td).is_contiguous()


def test_new_entries_reach_the_source(step: Step) -> None:
    td = make()
    view = lazily(step, td)
    size = view.batch_size
    new = torch.arange(view.numel() * 2).view(*size, 2)
    view["new"] = new
    view["n", "new"] = new
    view.update({"m": {"k": {"l": new}}})
    view["node"] = TensorDict({"e": new}, [*size, 2])
    for key in ("new", ("n", "new"), ("m", "k", "l"), ("node", "e")):
        assert view[key].equal(new)
    source = root(view)
    assert source["new"].shape == (*source.batch_size, 2)
    assert source["m", "k"].batch_size == source.batch_size
    assert source["node"].batch_size == (*source.batch_size, 2)
    if source.batch_size == td.batch_size:
        assert source is td
    assert_equal(step(source) if source is td else view, view)


def test_written_memory_is_shared(step: Step) -> None:
    """A new tensor is stored as a view of itself where its memory allows it."""
    td = make()
    view = lazily(step, td)
    new = torch.zeros(view.batch_size)
    view["new"] = new
    view.fill_("new", 3)
    assert (new == 3).all() and (root(view)["new"] == 3).all()


def test_in_place_writes_reach_the_source(step: Step) -> None:
    td = make()
    view = lazily(step, td)
    view.set_("a", torch.full_like(view["a"], 7.0))
    assert (td["a"] == 7).all()
    view["n"].zero_()
    assert not td["n", "x"].any()
    last = tuple([-1] * view.ndim)
    view[last] = view[last].apply(lambda x: x + 1)
    assert td["n", "x"].sum() == 1 and td["a"].sum() == 24 * 7 + 4
    view.apply_(lambda x: x.fill_(2))
    assert (td["deep", "y"] == 2).all()


def test_what_is_written_to_the_source_is_seen(step: Step) -> None:
    td = make()
    view = lazily(step, td)
    if root(view) is not td:
        pytest.skip("the view is of another container over the same tensors")
    node = view["n"]
    td["new"] = torch.zeros(2, 3)
    td["n", "new"] = torch.zeros(2, 3)
    del td["a"]
    assert set(view.keys()) == {"n", "deep", "new"} and "new" in node.keys()
    assert_equal(view, step(td))


def test_removal_and_renaming(step: Step) -> None:
    view = lazily(step, make())
    source = root(view)
    del view["n", "x"]
    assert view.pop("a").shape[: view.ndim] == view.batch_size
    assert set(source.keys(True)) == {"n", "deep", ("deep", "y")}
    deep = source["deep"]
    view.rename_key_("deep", "renamed")
    assert source["renamed"] is deep and list(source.keys()) == ["n", "renamed"]
    view.clear()
    assert not source.keys()


def test_a_value_that_does_not_fit_changes_nothing(step: Step) -> None:
    view = lazily(step, make())
    with pytest.raises(RuntimeError, match="'bad'"):
        view["n", "bad"] = torch.zeros(7)
    assert set(root(view)["n"].keys()) == {"x"}


def test_a_leaf_that_cannot_be_viewed_is_named() -> None:
    td = TensorDict({"a": torch.zeros(3, 2).t()}, [2, 3])
    flat = lazily(lambda td: td.view(-1), td)
    with pytest.raises(RuntimeError, match="'a'.*view size"):
        flat["a"]
    assert list(flat.keys(True, True)) == ["a"] and len(flat.keys()) == 1 and "a" in flat.keys()
    # Written values are put in the form of the source, copied where they must be.
    flat["b"] = torch.arange(12).view(2, 6).t()[:, 0]
    assert td["b"].tolist() == [[0, 1, 2], [3, 4, 5]]


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[Plain, tuple[int, ...]], list[tuple[str, Any]]]:
    """A structure, and shape methods to call one after the other."""
    drawn = draw(structures(min_side=1))
    size = list(drawn[1])
    steps: list[tuple[str, Any]] = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["unsqueeze", "squeeze", "permute", "transpose"]))
        if kind == "unsqueeze":
            dim = draw(st.integers(0, len(size)))
            steps.append((kind, (dim,)))
            size.insert(dim, 1)
        elif kind == "squeeze":
            steps.append((kind, ()))
            size = [n for n in size if n != 1]
        elif kind == "permute":
            order = draw(st.permutations(range(len(size))))
            steps.append((kind, (tuple(order),)))
            size = [size[i] for i in order]
        elif size:
            dims = draw(st.tuples(*[st.integers(0, len(size) - 1)] * 2))
            steps.append((kind, dims))
            size[dims[0]], size[dims[1]] = size[dims[1]], size[dims[0]]
    return drawn, steps


@given(chains(), st.data())
def test_chains(drawn: tuple[tuple[Plain, tuple[int, ...]], list[tuple[str, Any]]], data: st.DataObject) -> None:
    (plain, batch_size), steps = drawn

    def chain(td: Any) -> Any:
        for method, arguments in steps:
            td = getattr(td, method)(*arguments)
        return td

    # A squeezed dim that comes back as the source's own has the name that the eager one has lost.
    named = all(method != "squeeze" for method, _ in steps)
    names = [f"d{i}" for i in range(len(batch_size))] if named else None
    td = TensorDict({"node": plain, **plain}, batch_size, names=names)
    lazy = lazily(chain, td)
    assert_equal(lazy, chain(td))
    new = data.draw(leaves(tuple(lazy.batch_size)))
    lazy["node", "new\nkey"] = new
    assert lazy["node", "new\nkey"].equal(new)
    assert chain(td)["node", "new\nkey"].equal(new)
    assert td["node", "new\nkey"].shape[: len(batch_size)] == batch_size


@given(structures(min_dims=1, min_side=1), batch_sizes(max_dims=2, min_side=1))
def test_views(drawn: tuple[Plain, tuple[int, ...]], head: tuple[int, ...]) -> None:
    plain, batch_size = drawn
    td = TensorDict(plain, batch_size)
    for size in [(-1,), (1, -1, 1), (*batch_size, 1), (batch_size[0], -1)]:
        assert_equal(lazily(lambda td, size=size: td.view(size), td), td.view(size))


# --- what is a view, and what is not ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        lambda td: td.view(-1).view(2, 3),
        lambda td: td.view(6).reshape(6).view((2, 3)),
        lambda td: td.permute(1, 0).permute(1, 0),
        lambda td: td.permute(1, 0).transpose(0, -1),
        lambda td: td.transpose(0, 1).swapdims(1, 0),
        lambda td: td.unsqueeze(0).squeeze(0),
        lambda td: td.unsqueeze(-1).squeeze(),
        lambda td: td.unsqueeze(1).permute(2, 0, 1).permute(1, 2, 0).squeeze(1),
        lambda td: td.view(2, 3),
        lambda td: td.permute(0, 1),
        lambda td: td.squeeze(),
        lambda td: td.transpose(1, 1),
    ],
)
def test_the_way_back_is_the_source(step: Step) -> None:
    td = make()
    assert lazily(step, td) is td


def test_the_way_back_of_several_dims() -> None:
    td = TensorDict({"a": torch.zeros(1, 2, 1)}, [1, 2, 1])
    assert lazily(lambda td: td.squeeze().view(1, 2, 1), td) is td
    assert lazily(lambda td: td.squeeze(0).unsqueeze(0), td) is td


@pytest.mark.parametrize(
    "step",
    [
        lambda td: td.reshape(-1),
        lambda td: td.flatten(0, 1),
        lambda td: td.unflatten(1, (3, 1)),
        lambda td: td.expand(4, 2, 3),
        lambda td: td[0],
        lambda td: td[:1],
        lambda td: td.split(1)[0],
        lambda td: td.unbind(0)[0],
        lambda td: td.select("a").view(torch.int32),
        lambda td: torch.cat([td, td]),
        lambda td: td.view(-1).clone(),
        lambda td: td.view(-1).apply(lambda x: x),
        lambda td: td.view(-1).select("a"),
        lambda td: td.view(-1)[0],
        lambda td: td.view(-1).copy(),
        lambda td: td.view(-1).to_tensordict(),
    ],
)
def test_what_stays_eager(step: Step) -> None:
    assert type(lazily(step, make())) is TensorDict


def test_a_view_outlives_the_setting() -> None:
    td = make()
    flat = lazily(lambda td: td.view(-1), td)
    assert type(flat.unsqueeze(0)) is TensorDict
    flat["later"] = torch.zeros(6)
    assert td["later"].shape == (2, 3)


def test_a_view_in_another_thread() -> None:
    """Reading and writing need no setting, so they work in threads that have not chosen."""
    td = make()
    flat = lazily(lambda td: td.view(-1), td)
    thread = threading.Thread(target=lambda: flat.set("new", flat["n", "x"] + 1))
    thread.start()
    thread.join()
    assert td["new"].tolist() == [[1, 2, 3], [4, 5, 6]]


# --- state ------------------------------------------------------------------------------------------------------------


def test_names() -> None:
    td = make()
    td.names = ["p", "q"]
    swapped = lazily(lambda td: td.permute(1, 0), td)
    assert swapped.names == ["q", "p"] and swapped["deep"].names == ["q", "p", None]
    swapped.names = ["u", None]
    assert td.names == [None, "u"] and td["n"].names == [None, "u"]
    td.names = ["v", "w"]
    assert swapped.names == ["w", "v"]
    row = lazily(lambda td: td.unsqueeze(0), td)
    assert row.names == [None, "v", "w"]
    row.names = [None, "x", "y"]
    assert td.names == ["x", "y"]
    with pytest.raises(RuntimeError, match="'one'"):
        row.names = ["one", "x", "y"]
    flat = lazily(lambda td: td.view(-1), td)
    assert flat.names == [None]
    with pytest.raises(RuntimeError, match="'flat'"):
        flat.names = ["flat"]
    assert td.names == ["x", "y"] and td["n"].names == ["x", "y"]
    flat["new", "leaf"] = torch.zeros(6)
    assert td["new"].names == ["x", "y"]
    row.names = None
    assert td.names == [None, None]


def test_the_batch_size_is_fixed() -> None:
    td = make()
    flat = lazily(lambda td: td.view(-1), td)
    for size in ([], [2, 3], [6, 4]):
        with pytest.raises(RuntimeError, match=r"\[6\] of a lazy view"):
            flat.batch_size = size
    with pytest.raises(RuntimeError, match="lazy view"):
        flat.auto_batch_size_(0)
    flat.batch_size = [6]
    holder = TensorDict({"flat": flat, "other": torch.zeros(6)}, [6])
    with pytest.raises(RuntimeError, match="lazy view"):
        holder.batch_size = [6, 1]
    assert holder.batch_size == flat.batch_size == (6,) and td.batch_size == (2, 3)


def test_locking() -> None:
    td = make()
    flat = lazily(lambda td: td.view(-1), td)
    flat.lock_()
    assert td.is_locked and td["n"].is_locked and flat["n"].is_locked and flat.is_locked
    with pytest.raises(LockedError, match="'new'"):
        flat["new"] = torch.zeros(6)
    with pytest.raises(LockedError):
        flat["n"].unlock_()
    flat.set_("a", torch.zeros(6, 4))
    flat.unlock_()
    assert not td.is_locked and not td["n"].is_locked
    td.lock_()
    assert flat.is_locked
    with flat.unlock_():
        flat["new"] = torch.zeros(6)
    assert td.is_locked and "new" in td.keys()
    # As a part of another container.
    td.unlock_()
    holder = TensorDict({"flat": flat}, [6]).lock_()
    assert td.is_locked
    with pytest.raises(LockedError):
        td.unlock_()
    holder.unlock_()
    assert not td.is_locked


def test_device() -> None:
    td = TensorDict({"a": torch.zeros(2, 3), "n": {}}, [2, 3], device="cpu")
    flat = lazily(lambda td: td.view(-1), td)
    assert flat.device == flat["n"].device == torch.device("cpu")
    assert flat.clear_device_() is flat
    assert td.device is None and td["n"].device is None


def test_as_a_context_manager() -> None:
    td = make()
    with set_lazy_legacy(True), td.view(-1) as flat:
        assert type(flat) is LazyView
        flat["new"] = torch.ones(6)
        del flat["a"]
    assert set(td.keys()) == {"n", "deep", "new"}


def test_saving(tmp_path: pathlib.Path) -> None:
    td = make()
    swapped = lazily(lambda td: td.transpose(0, 1), td)
    saved = swapped.memmap(tmp_path / "copy")
    assert type(saved) is TensorDict
    assert_equal(load_memmap(tmp_path / "copy"), td.transpose(0, 1))
    assert swapped.memmap_(tmp_path / "source") is swapped
    assert td.is_memmap() and swapped.is_memmap() and swapped.is_locked
    assert_equal(load_memmap(tmp_path / "source"), td)


def test_pickle() -> None:
    td = make()
    swapped = lazily(lambda td: td.transpose(0, 1), td).lock_()
    again = pickle.loads(pickle.dumps(swapped))
    assert type(again) is LazyView and again.is_locked
    assert_equal(again, swapped)
    again.unlock_()["new"] = torch.zeros(3, 2)
    assert again._source["new"].shape == (2, 3) and "new" not in td.keys()


def test_gradients_flow_through() -> None:
    td = TensorDict({"a": torch.ones(2, 3, requires_grad=True)}, [2, 3])
    (lazily(lambda td: td.view(-1), td)["a"] * torch.arange(6)).sum().backward()
    assert td["a"].grad.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_vmap() -> None:
    swapped = lazily(lambda td: td.transpose(0, 1), make())
    out = torch.vmap(lambda td: TensorDict({"sum": td["a"].sum()}))(swapped)
    assert out["sum"].equal(swapped["a"].sum((1, 2)))


def test_repr() -> None:
    td = TensorDict({"a": torch.zeros(2, 1, 3)}, [2, 1])
    lines = """
        LazyView(
            source=TensorDict(
                fields={
                    a: Tensor(shape=torch.Size([2, 1, 3]), device=cpu, dtype=torch.float32, is_shared=False)},
                batch_size=torch.Size([2, 1]),
                device=None,
                is_shared=False),
            op=OPERATION)
        """
    for step, text in [
        (lambda td: td.view(-1), "view(2)"),
        (lambda td: td.transpose(-1, 0), "transpose(0, 1)"),
        (lambda td: td.squeeze(), "squeeze(1)"),
        (lambda td: td.unsqueeze(-1), "unsqueeze(2)"),
    ]:
        assert repr(lazily(step, td)) == dedent(lines).strip().replace("OPERATION", text)
    assert '"td-key">a<' in lazily(lambda td: td.view(-1), td)._repr_html_()


# --- stacks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [torch.stack, TensorDict.stack])
def test_stack(stack: Callable[..., Any]) -> None:
    items = [make(), make()]
    assert type(stack(items)) is TensorDict
    for dim in (0, 1, -1):
        with set_lazy_legacy(True):
            lazy = stack(items, dim)
        assert type(lazy) is LazyStackedTensorDict
        eager = stack(items, dim)
        assert lazy.batch_size == eager.batch_size and (lazy.to_tensordict() == eager).all()
        lazy["new"] = torch.zeros(lazy.batch_size)
        assert all("new" in item.keys() for item in items)
    with set_lazy_legacy(True):
        out = stack(items).to_tensordict()
        assert stack(items, out=out) is out


def test_stack_of_what_cannot_be_stacked() -> None:
    with set_lazy_legacy(True):
        lazy = torch.stack([TensorDict({"a": torch.zeros(2)}), TensorDict({"b": torch.zeros(3)})])
        assert lazy.batch_size == (2,) and not list(lazy.keys())
        with pytest.raises(RuntimeError, match="dims"):
            torch.stack([TensorDict(batch_size=[2]), TensorDict(batch_size=[3, 1])])
        with pytest.raises(RuntimeError, match="empty"):
            TensorDict.stack([])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", [name for name in STEPS if not name.startswith("squeeze")])
def test_views_of_a_lazy_stack(dim: int, name: str) -> None:
    """Writes reach the members of lazy views and of lazy stacks of views."""
    step = STEPS[name]
    items = [item.clone() for item in make().unbind(dim)]
    view = lazily(step, lazy_stack(items, dim))
    assert_equal(view.to_tensordict(), step(make()))
    new = torch.arange(6).view(view.batch_size) + 100
    view["new"] = new
    view["n", "x"] = new
    assert view["new"].equal(new) and view["n", "x"].equal(new)
    expected = torch.stack(items, dim)
    assert step(expected)["new"].equal(new) and step(expected)["n", "x"].equal(new)


def test_the_only_member_of_a_lazy_stack() -> None:
    item = make()
    view = lazily(lambda td: td.squeeze(0), lazy_stack([item]))
    view["new"] = torch.zeros(2, 3)
    view["n", "new"] = torch.zeros(2, 3)
    assert item["new"].shape == item["n", "new"].shape == (2, 3)
