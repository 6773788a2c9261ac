"""The mixin of `plot`, which draws the leaves with Matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensordict.looking.plots import BINS, draw_figure
from tensordict.ops.dims.naming import Naming

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tensordict.core.keys import Key


class Plotting(Naming):
    """`plot`."""

    def plot(
        self,
        keys: Key | Sequence[Key] | None = None,
        *,
        dim: int | str | None = None,
        bins: int = BINS,
        most: int = 12,
        ax: Axes | Sequence[Axes] | None = None,
        figsize: tuple[float, float] | None = None,
    ) -> Figure:
        """Plot the leaves: a histogram of each, or lines along a batch dim.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(reward=torch.rand(8, 100), done=torch.zeros(8, 100, dtype=torch.bool))
            >>> td = td.auto_batch_size_(2).refine_names("env", "time")
            >>> figure = td.plot()
            >>> [axes.get_title(loc="left") for axes in figure.axes]
            ['reward', 'done']
            >>> td.plot("reward", dim="time").axes[0].get_xlabel()
            'time'

        Args:
            keys: a key or a list of keys of leaves or nested containers. By default, plot all leaves.
            dim: plot lines along this batch dim, given by number or by name. Up to 8 elements of the other dims are a
                line each; for more, the plot shows their mean and their range. By default, plot histograms.
            bins: the largest number of bars of a histogram. Integers with a smaller range have one bar per value.
            most: the largest number of leaves to plot. The figure says how many more there are.
            ax: the axes to plot into, one for each leaf. By default, make a new figure.
            figsize: the width and the height of the new figure, in inches.

        Returns:
            the figure. Notebooks show it, and `figure.savefig("leaves.png")` saves it.

        Raises:
            ModuleNotFoundError: Matplotlib is not installed. The extra `report` contains it.
            KeyError: the container lacks a key.
            ValueError: none of the leaves can be plotted, or `ax` has too few axes.
            IndexError: the batch dim is out of range, or its name is unknown.

        Non-tensor values are skipped, and so are complex, sparse and empty leaves, and ragged leaves with `dim`.
        Histograms skip NaN and infinite elements and show their number. For speed, at most 1,048,576 elements of a leaf
        are read, in rows at equal steps, and a line has at most 2,000 points; the plot says so. Only these are read
        from a file or a URL.
        """
        if bins < 1 or most < 1:
            raise ValueError(f"plot: bins and most are 1 or more, got bins={bins} and most={most}")
        place = None if dim is None else self._dim(dim)
        container: Any = self
        if keys is not None:
            chosen = keys if isinstance(keys, (list, set)) else [keys]
            container = self.select(*chosen)
        return draw_figure(container, place, bins, most, ax, figsize)  # type: ignore[no-any-return]
