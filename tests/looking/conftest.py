"""A browser without a screen, which pictures pages in light and in dark; the pictures are kept in build/screenshots."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

KEPT = pathlib.Path(__file__).parents[2] / "build" / "screenshots"
# None of these makes it ask for anything in the network.
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]

Picture = Callable[..., np.ndarray[Any, Any]]


@pytest.fixture
def picture(tmp_path: pathlib.Path) -> Picture:
    """Pictures a page: (HTML, name, dark, width and height) -> pixels, of height, width and 3 colours."""
    program = shutil.which("chromium")
    if program is None:
        pytest.fail("there is no chromium on the PATH: `make chromium` installs it")

    def taken(page: str, name: str, dark: bool = False, size: tuple[int, int] = (1100, 900)) -> np.ndarray[Any, Any]:
        source, target = tmp_path / f"{name}.html", KEPT / f"{name}-{'dark' if dark else 'light'}.png"
        source.write_text(page, encoding="utf-8")
        KEPT.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        scheme = [] if not dark else ["--blink-settings=preferredColorScheme=0"]
        options = [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={size[0]},{size[1]}", *scheme]
        subprocess.run(
            [program, *QUIET, *options, f"--screenshot={target}", source.as_uri()],
            check=True,
            capture_output=True,
            timeout=120,
        )
        with Image.open(target) as image:
            return np.asarray(image.convert("RGB"))

    return taken
