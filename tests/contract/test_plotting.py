"""`plot`, on every kind of container."""

from __future__ import annotations

from typing import Any

from contract.kinds import Kind
from contract.model import Plain, leaves


def test_plot(td: Any, plain: Plain, kind: Kind) -> None:
    figure = td.plot()
    assert sorted(axes.get_title(loc="left") for axes in figure.axes if axes.axison) == sorted(
        ".".join(path) for path in leaves(plain)
    )
    for axes in figure.axes:
        if axes.axison:
            leaf = leaves(plain)[tuple(axes.get_title(loc="left").split("."))]
            if (leaf == leaf.flatten()[0]).all():
                assert axes.texts[0].get_text().startswith("constant: ") and not axes.patches
            else:
                assert axes.patches[0].get_data()[0].sum() == leaf.numel()


def test_lines(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        return
    axes = td.plot("mask", dim=-1).axes[0]
    lines = [line.get_ydata().tolist() for line in axes.lines]
    expected = plain["mask"].movedim(len(kind.batch_size) - 1, -1).reshape(-1, kind.batch_size[-1])
    assert lines == expected.double().tolist()
