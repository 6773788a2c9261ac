"""Shapes, dims and indices drawn for a batch size, valid ones mostly; written as code."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence


def comma(parts: Sequence[object]) -> str:
    """The inside of a tuple."""
    return ", ".join(map(str, parts)) + ("," if len(parts) == 1 else "")


class Arrangements:
    """Draws with `random`."""

    def __init__(self, rng: random.Random) -> None:
        self.r = rng

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def dim(self, count: int) -> str:
        """One of `count` dims."""
        if self.chance(0.1) or count == 0:
            return str(self.r.choice([count, -count - 1, 0, -1, 7]))
        return str(self.r.randrange(-count, count))

    def _position(self, size: int) -> int:
        return self.r.randrange(-size, size) if size > 0 else 0

    def _positions(self, size: int, counts: list[int]) -> list[int]:
        return [self._position(size) for _ in range(self.r.choice(counts))] if size else []

    def index1(self, size: int) -> str:
        """An index of one dim of `size` elements."""
        r = self.r
        p = r.random()
        if p < 0.22:
            return str(self._position(size))
        if p < 0.27:
            return str(size + 1)
        if p < 0.45:
            return r.choice([":", "1:", ":-1", "::2", ":1", "0:0", "-2:", f"{size}:", "1:100", "::-1", "None:None"])
        if p < 0.52:
            return str(self._positions(size, [0, 1, 2, 3]))
        if p < 0.57:
            return f"range({r.choice([0, 1, size])})"
        return self._index_of_many(size, p)

    def _index_of_many(self, size: int, p: float) -> str:
        """Tensors, arrays, masks and what is none of them."""
        r, position = self.r, self._position
        if p < 0.66:
            return f"torch.tensor({self._positions(size, [1, 2, 3])}{'' if size else ', dtype=i64'})"
        if p < 0.70:
            return f"torch.tensor([[{position(size)}, {position(size)}]])" if size else "torch.zeros(1, 0, dtype=i64)"
        if p < 0.73:
            return f"torch.tensor({position(size)})"
        if p < 0.83:
            return f"torch.tensor({self._booleans(size)}{'' if size else ', dtype=bl'})"
        if p < 0.87:
            return f"{self._booleans(size)}"
        if p < 0.91:
            positions = [position(size) for _ in range(2)] if size else []
            return f"np.array({positions}{'' if size else ', dtype=int'})"
        if p < 0.93:
            return f"np.int64({position(size)})"
        if p < 0.95:
            return f"np.array({self._booleans(size)}, dtype=bool)"
        if p < 0.97:
            return f"torch.tensor({[position(size)] if size else []}, dtype=i32)"
        pair = f"({position(size)}, {position(size)})"
        odd = ["True", "False", "1.5", "torch.tensor(True)", pair, "torch.tensor([True])", "torch.Size([0])"]
        return r.choice(odd)

    def _booleans(self, size: int) -> list[bool]:
        return [self.chance(0.5) for _ in range(size)]

    def index(self, shape: list[int]) -> str:
        """An index of a container of this batch size, of one dim or of several."""
        r = self.r
        p = r.random()
        for share, index in ((0.05, "..."), (0.08, "None"), (0.10, "()")):
            if p < share:
                return index
        if p < 0.13 and shape:
            return f"T({', '.join(map(str, shape))}, dt=bl, s={r.randrange(5)})"
        if p < 0.15:
            return r.choice(["True", "False", "torch.tensor(True)", "torch.tensor(False)"])
        if p < 0.5 or not shape:
            return self.index1(shape[0] if shape else 1)
        return comma(self._index_parts(shape))

    def _index_parts(self, shape: list[int]) -> list[str]:
        r = self.r
        parts: list[str] = []
        i = 0
        while i < len(shape):
            p = r.random()
            if p < 0.1:
                parts.append("None")
            elif p < 0.17 and "..." not in parts:
                parts.append("...")
                i += r.randrange(0, 2)
                continue
            elif p < 0.22 and i + 1 < len(shape):
                parts.append(f"T({shape[i]}, {shape[i + 1]}, dt=bl, s={r.randrange(5)})")
                i += 2
                continue
            else:
                parts.append(self.index1(shape[i]))
                i += 1
            if self.chance(0.12):
                break
        if self.chance(0.05):
            parts.append(r.choice(["0", ":", "None", "..."]))
        return parts

    def reshape(self, shape: list[int]) -> str:
        """The arguments of `reshape` and `view`: numbers, a tuple, a list or a `torch.Size`."""
        r = self.r
        p = r.random()
        if p < 0.8:
            choices = [(0.25, [-1]), (0.35, [math.prod(shape)]), (0.5, shape[::-1]), (0.6, [1, *shape])]
            out = next((o for share, o in choices if p < share), [*shape, 1])
            if p >= 0.7:
                out = [-1, *shape[1:]] if shape else [2, -1]
        elif p < 0.9:
            out = [2, -1]
        else:
            out = [r.choice([1, 2, 3, -1]) for _ in range(r.choice([0, 1, 2]))]
        form = r.random()
        if form < 0.5 and out:
            return ", ".join(map(str, out))
        if form < 0.75:
            return f"({comma(out)})"
        return f"torch.Size({out})" if form < 0.9 else f"{out}"

    def expand(self, shape: list[int]) -> str:
        """The arguments of `expand`."""
        r = self.r
        out = []
        for size in shape:
            if size == 1 and self.chance(0.7):
                out.append(r.choice([2, 3]))
            else:
                out.append(-1 if self.chance(0.25) else size)
        if self.chance(0.5):
            out = [r.choice([1, 2, 3]), *out]
        if self.chance(0.08):
            out = out[1:]
        if self.chance(0.08):
            out = [size + 1 for size in out]
        form = r.random()
        if form < 0.5 and out:
            return ", ".join(map(str, out))
        return f"({comma(out)})" if form < 0.8 else f"torch.Size({out})"
