"""`td.plot()`: histograms of leaves and lines along a dim, and how little is read for them."""

from __future__ import annotations

import math
import pathlib
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch

from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack, load
from tensordict.looking.plots import bin_edges
from tensordict.memory.stored_tensors import StoredTensor

# Torch says of its strided nested tensors, to whoever makes the first, that they are a prototype.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def trajectories() -> TensorDict:
    return TensorDict(
        {
            "reward": torch.arange(12.0).reshape(3, 4),
            "obs": torch.randn(3, 4, 5),
            "n": {"done": torch.zeros(3, 4, dtype=torch.bool)},
            "who": NonTensorStack(*[NonTensorStack(*"abcd") for _ in range(3)]),
        },
        batch_size=[3, 4],
        names=["env", "time"],
    )


def titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]


def bars(axes: Any) -> tuple[list[float], list[float]]:
    """The heights of a histogram and the edges of its bars."""
    values, edges, _ = axes.patches[0].get_data()
    return values.tolist(), edges.tolist()


def test_histograms_of_all_leaves() -> None:
    figure = trajectories().plot()
    assert titles(figure) == ["reward", "obs", "n.done"]
    assert bars(figure.axes[0]) == ([1.0] * 12, [at - 0.5 for at in range(13)])
    # A constant would be one block.
    assert not figure.axes[2].patches and [text.get_text() for text in figure.axes[2].texts] == ["constant: 0"]
    assert sum(bars(figure.axes[1])[0]) == 60


def test_what_is_not_finite_is_told() -> None:
    axes = TensorDict(a=torch.tensor([0.0, 1.0, math.nan, math.inf])).plot().axes[0]
    assert axes.get_title(loc="right") == "2 not finite" and sum(bars(axes)[0]) == 2
    axes = TensorDict(a=torch.tensor([math.nan])).plot().axes[0]
    assert axes.get_title(loc="right") == "1 not finite, no numbers"


def test_keys() -> None:
    td = trajectories()
    assert titles(td.plot("obs")) == ["obs"]
    assert titles(td.plot(["obs", ("n", "done")])) == ["obs", "n.done"]
    assert titles(td.plot(("n", "done"))) == titles(td.plot("n")) == ["n.done"]
    with pytest.raises(KeyError, match="missing"):
        td.plot("missing")
    with pytest.raises(ValueError, match="no leaf of numbers to plot.*'who'"):
        td.plot("who")


def test_no_more_leaves_than_wanted() -> None:
    td = TensorDict({f"k{i}": torch.zeros(2) for i in range(15)})
    figure = td.plot()
    assert len(titles(figure)) == 12 and figure.get_supxlabel().startswith("3 more leaves are not shown")
    assert len(titles(td.plot(most=15))) == 15 and td.plot(most=14).get_supxlabel().startswith("1 more leaf is")
    assert td.plot(most=15).get_supxlabel() == ""


@pytest.mark.parametrize("dim", ["time", 1, -1])
def test_lines_along_a_dim(dim: int | str) -> None:
    figure = trajectories().plot(dim=dim)
    assert titles(figure) == ["reward", "obs", "n.done"]
    reward, obs = figure.axes[:2]
    assert reward.get_xlabel() == "time"
    assert [line.get_ydata().tolist() for line in reward.lines] == torch.arange(12.0).reshape(3, 4).tolist()
    assert [line.get_xdata().tolist() for line in reward.lines] == [[0, 1, 2, 3]] * 3
    # Of 15 elements, their mean and range.
    assert len(obs.lines) == 1 and len(obs.collections) == 1 and obs.get_title(loc="right") == "mean and range of 15"


def test_lines_of_the_first_dim_and_of_no_name() -> None:
    lines = trajectories().plot("reward", dim="env").axes[0].lines
    assert [line.get_ydata().tolist() for line in lines][1] == [1, 5, 9]
    assert TensorDict(a=torch.zeros(3), batch_size=[3]).plot(dim=0).axes[0].get_xlabel() == "dim 0"


def test_long_lines_are_thinned() -> None:
    td = TensorDict(a=torch.arange(9000.0), batch_size=[9000])
    axes = td.plot(dim=0).axes[0]
    at, values = axes.lines[0].get_data()
    assert len(at) == 1800 and np.array_equal(at, np.arange(0, 9000, 5)) and np.array_equal(at, values)
    assert axes.get_title(loc="right") == "1 of 5 points"


def test_own_axes_are_used() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    own = figure.subplots(1, 3)
    assert trajectories().plot(ax=own) is figure and titles(figure) == ["reward", "obs", "n.done"]
    single = Figure().subplots()
    assert trajectories().plot("obs", ax=single) is single.figure
    with pytest.raises(ValueError, match="3 leaves and 1 axes"):
        trajectories().plot(ax=single)
    assert trajectories().plot(figsize=(3, 2)).get_size_inches().tolist() == [3, 2]


def test_wrong_arguments() -> None:
    td = trajectories()
    with pytest.raises(IndexError, match="no dim is named 'step'"):
        td.plot(dim="step")
    with pytest.raises(IndexError, match="out of range"):
        td.plot(dim=2)
    with pytest.raises(ValueError, match="bins=0"):
        td.plot(bins=0)
    with pytest.raises(ValueError, match="nothing|no leaf"):
        TensorDict().plot()


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'tensordict[report]'")):
        trajectories().plot()


def test_notebooks_are_given_a_picture() -> None:
    assert trajectories().plot()._repr_png_().startswith(b"\x89PNG")


def test_a_name_is_no_formula() -> None:
    figure = TensorDict({"$x^": torch.zeros(2)}).plot()
    assert figure._repr_png_() and titles(figure) == [r"\$x^"]


def test_ragged_leaves() -> None:
    stack = lazy_stack([TensorDict(a=torch.arange(n)) for n in (1, 3)])
    assert bars(stack.plot().axes[0])[0] == [2, 1, 1]
    nested = TensorDict({"a": torch.nested.nested_tensor([torch.arange(1), torch.arange(3)], layout=torch.jagged)}, [2])
    assert bars(nested.plot().axes[0])[0] == [2, 1, 1]
    with pytest.raises(ValueError, match="no leaf"):
        stack.plot(dim=0)


def test_leaves_without_numbers_are_left_out() -> None:
    td = TensorDict(a=torch.ones(2), meta=torch.ones(2, device="meta"), complex=torch.ones(2, dtype=torch.complex64))
    td._entries["sparse"] = torch.eye(2).to_sparse()
    assert titles(td.plot()) == ["a"]
    with pytest.raises(ValueError, match="no leaf"):
        TensorDict.from_module(torch.nn.LazyLinear(2)).plot()


def test_of_large_leaves_rows_are_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = torch.arange(1 << 21).reshape(1 << 14, 128)
    TensorDict(a=big, batch_size=[1 << 14]).to_h5(tmp_path / "a.h5").close()
    read: list[int] = []
    before = StoredTensor._read

    def counted(self: Any, selection: Any, shape: Any, order: Any = None) -> Any:
        read.append(math.prod(shape))
        return before(self, selection, shape, order)

    monkeypatch.setattr(StoredTensor, "_read", counted)
    axes = load(tmp_path / "a.h5").plot().axes[0]
    assert sum(read) == 1 << 20 and axes.get_title(loc="right") == "1 of 2 rows"
    assert sum(bars(axes)[0]) == 1 << 20
    read.clear()
    load(tmp_path / "a.h5").plot(dim=0)
    assert sum(read) == 128 * math.ceil((1 << 14) / 9)


def test_of_a_stack_of_many() -> None:
    many = LazyStackedTensorDict(*[TensorDict(a=torch.full((600,), float(i))) for i in range(4000)])
    assert many.plot().axes[0].get_title(loc="right") == "1 of 3 rows"


@pytest.mark.parametrize(
    ("samples", "bins", "edges"),
    [
        ([[3, 3]], 4, [2.5, 3.5]),
        ([[0, 2], [5]], 40, [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5]),
        ([[0, 255]], 40, [-0.5 + 7 * at for at in range(38)]),
        ([[0, 9]], 10, [-0.5 + at for at in range(11)]),
        ([[0, 10]], 10, [-0.5 + 2 * at for at in range(7)]),
        ([[0.5, 0.5]], 4, [0.0, 1.0]),
        ([[0, 0.5, 4]], 4, [0, 1, 2, 3, 4]),
        ([[-1e299, 0.5, 1e299]], 2, [-1e299, 0, 1e299]),
    ],
)
def test_edges_of_bins(samples: list[list[float]], bins: int, edges: list[float]) -> None:
    found = bin_edges([np.array(sample, float) for sample in samples], bins)
    assert found is not None and np.allclose(found, edges)
    assert bin_edges([np.zeros(0)]) is None and bin_edges([np.array([-1.7e308, 1.7e308])]) is None


def test_all_elements_are_in_a_bin() -> None:
    for sample in ([-(2.0**63), 2.0**63], [0.0, 2.0**53], [3.0, 1e15, 7.0], [-1e299, 1e299]):
        edges = bin_edges([np.array(sample)])
        assert edges is not None and len(edges) <= 42
        assert np.histogram(np.array(sample), edges)[0].sum() == len(sample)


def test_what_is_too_far_apart() -> None:
    figure = TensorDict(a=torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64)).plot()
    assert figure.axes[0].get_title(loc="right") == "too far apart" and figure._repr_png_()
