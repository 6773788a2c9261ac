"""`plot`: a quick look at the leaves."""

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
    """A figure of the leaves."""

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
        """A quick look at the leaves: a histogram of each, or lines along a batch dim.

        Values that are no tensors are left out, and leaves that are complex, sparse or without elements, as ragged ones
        are with `dim`; NaN and infinite
        elements are left out of histograms, which say how many there are. Of leaves with more than 1,048,576 elements,
        rows at equal steps are read, and of lines no more than 2,000 points; the plots say so. What is in a file or at
        a URL is read no further than that.

        Args:
            keys: which leaves, or containers of leaves: a key, or a list of keys; all of them by default.
            dim: the batch dim, or its name, that runs from left to right; histograms by default. Of up to 8 elements
                in the other dims, each is a line; of more, there is their mean, and the range from the least to the
                greatest.
            bins: how many bars a histogram has, at most; integers with a smaller range have one each.
            most: how many leaves to show, at most; the figure says how many are left out.
            ax: where to plot: the axes of a figure of yours, one for each leaf.
            figsize: the width and the height of the new figure, in inches.

        Returns:
            the figure: a new one, which notebooks show and `figure.savefig("leaves.png")` saves, or that of `ax`.

        Raises:
            ModuleNotFoundError: Matplotlib is not installed: the extra `report` has it.
            KeyError: there is no such key.
            ValueError: there is nothing to plot, or there are too few axes.
            IndexError: there is no such batch dim.

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
        """
        if bins < 1 or most < 1:
            raise ValueError(f"plot: bins and most are 1 or more, got bins={bins} and most={most}")
        place = None if dim is None else self._dim(dim)
        container: Any = self
        if keys is not None:
            chosen = keys if isinstance(keys, (list, set)) else [keys]
            container = self.select(*chosen)
        return draw_figure(container, place, bins, most, ax, figsize)  # type: ignore[no-any-return]
