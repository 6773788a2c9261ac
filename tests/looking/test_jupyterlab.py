"""Opens `examples/first_look.ipynb` in JupyterLab (`.venv-jupyter`) in Chromium; screenshots lie in build/screenshots.

`tests/examples/test_notebook.py` runs the same notebook without JupyterLab and without a browser.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

ROOT = pathlib.Path(__file__).parents[2]
LAB = ROOT / ".venv-jupyter/bin/jupyter-lab"
KEPT = ROOT / "build" / "screenshots"
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    # The page contains all cells, also hidden ones.
    "notebook-extension/tracker": {"windowingMode": "none"},
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LAB.exists(), reason="without JupyterLab: make .venv-jupyter/installed"),
]


@contextlib.contextmanager
def lab(home: pathlib.Path, folder: pathlib.Path, theme: str) -> Iterator[str]:
    """The URL of a server for the notebooks in a folder, of somebody whose settings and signatures are in `home`."""
    for name, settings in {**SETTINGS, "apputils-extension/themes": {"theme": f"JupyterLab {theme}"}}.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    places = {"CONFIG_DIR": "config", "DATA_DIR": "data", "RUNTIME_DIR": "runtime", "LAB_SETTINGS_DIR": "settings"}
    places = {f"JUPYTER{'' if name[:3] == 'LAB' else '_'}{name}": str(home / path) for name, path in places.items()}
    options = ["--no-browser", "--allow-root", f"--port={url.rpartition(':')[2]}", "--IdentityProvider.token="]
    with open(home / "log", "wb") as log:
        process = subprocess.Popen(
            [LAB, *options, f"--ServerApp.root_dir={folder}"],
            env={**os.environ, **places, "IPYTHONDIR": str(home / "ipython"), "PYTHONPATH": str(ROOT / "src")},
            stdout=log,
            stderr=log,
        )
    try:
        until = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < until, (home / "log").read_text()[-2000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/api", timeout=5):
                break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:  # it waits for kernels that are about to start
            process.kill()
            process.wait()


@pytest.fixture
def browser(tmp_path: pathlib.Path) -> Iterator[webdriver.Chrome]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.fail("there is no chromium or no chromedriver on the PATH: `make chromium` installs them")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for option in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "window-size=1300,1000"):
        options.add_argument(f"--{option}")
    options.add_argument("--disable-background-networking")
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


def opened(browser: webdriver.Chrome, url: str) -> None:
    """Open the notebook, and wait until its cells are there."""
    browser.get(f"{url}/lab/tree/first_look.ipynb?reset")
    WebDriverWait(browser, 90).until(lambda page: page.find_elements(By.CSS_SELECTOR, ".jp-Notebook .jp-CodeCell"))


def run_all(browser: webdriver.Chrome) -> None:
    """Run all cells by the menu when the kernel is there, and wait until each has a number."""
    idle = ".jp-Notebook-ExecutionIndicator[data-status='idle']"
    WebDriverWait(browser, 60).until(lambda page: page.find_elements(By.CSS_SELECTOR, idle))
    time.sleep(2)  # its session may still be put in order

    def done(page: webdriver.Chrome) -> bool:
        prompts = [item.text for item in page.find_elements(By.CSS_SELECTOR, ".jp-CodeCell .jp-InputPrompt")]
        return bool(prompts) and all(text.strip("[]:").isdigit() for text in prompts)

    entry = "//div[contains(@class, 'lm-Menu-itemLabel') and text()='Run All Cells']"
    for _ in range(4):  # a page that is still put in order forgets what has run
        browser.find_element(By.XPATH, "//div[contains(@class, 'lm-MenuBar-itemLabel') and text()='Run']").click()
        WebDriverWait(browser, 30).until(lambda page: page.find_element(By.XPATH, entry)).click()
        with contextlib.suppress(TimeoutException):
            WebDriverWait(browser, 20).until(done)
            return
    browser.save_screenshot(str(KEPT / "jupyterlab-failed.png"))
    pytest.fail("the cells were not run")


def kept(browser: webdriver.Chrome, name: str) -> None:
    """Keep pictures of the cells that show something."""
    KEPT.mkdir(parents=True, exist_ok=True)
    cells = browser.find_elements(By.CSS_SELECTOR, ".jp-CodeCell")
    for number, cell in enumerate(cells):
        if cell.find_elements(By.CSS_SELECTOR, ".jp-OutputArea-output"):
            browser.execute_script("arguments[0].scrollIntoView({block: 'start'})", cell)
            cell.screenshot(str(KEPT / f"jupyterlab-{name}-{number}.png"))


def brightness(browser: webdriver.Chrome, selector: str, what: str) -> float:
    """That of a colour of an element, from 0 to 255."""
    colour = browser.find_element(By.CSS_SELECTOR, selector).value_of_css_property(what)
    return sum(map(float, colour[colour.index("(") + 1 : -1].split(",")[:3])) / 3


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_first_look(tmp_path: pathlib.Path, browser: webdriver.Chrome, theme: str) -> None:
    folder = tmp_path / "notebooks"
    folder.mkdir()
    shutil.copy(ROOT / "examples" / "first_look.ipynb", folder)
    with lab(tmp_path / "home", folder, theme) as url:
        opened(browser, url)
        run_all(browser)
        trees = browser.find_elements(By.CSS_SELECTOR, ".jp-OutputArea-output .tensordict")
        assert len(trees) == 5  # with that of `describe`
        # Text and background follow the theme, whatever the system prefers.
        text, back = (brightness(browser, ".tensordict", what) for what in ("color", "background-color"))
        assert (text < 60 and back > 240) if theme == "Light" else (text > 200 and back < 40)
        image = trees[0].find_element(By.XPATH, ".//details[.//span[text()='image']][contains(@class, 'td-leaf')]")
        assert image.get_attribute("open") is None
        image.find_element(By.TAG_NAME, "summary").click()
        pictures = image.find_elements(By.TAG_NAME, "img")
        assert len(pictures) == 6 and all(picture.is_displayed() for picture in pictures)
        kept(browser, theme.lower())
        shown = "\n".join(item.text for item in browser.find_elements(By.CSS_SELECTOR, ".jp-OutputArea-output"))
        assert "saving: 100%" in shown and "Warning" not in shown and "Error:" not in shown
        plot = browser.find_elements(By.CSS_SELECTOR, ".jp-RenderedImage img")
        assert len(plot) == 1 and plot[0].size["width"] > 300
        browser.find_element(By.TAG_NAME, "body").send_keys(Keys.CONTROL, "s")
        path = folder / "first_look.ipynb"
        WebDriverWait(browser, 30).until(lambda _: "text/html" in path.read_text())
        browser.get("about:blank")
    if theme == "Dark":
        return
    # Somebody else opens it: JupyterLab takes out the style, and the levels are still to be seen.
    with lab(tmp_path / "other", folder, theme) as url:
        opened(browser, url)
        summaries = WebDriverWait(browser, 30).until(
            lambda page: page.find_elements(By.CSS_SELECTOR, ".jp-OutputArea-output summary")
        )
        assert not browser.find_elements(By.CSS_SELECTOR, ".jp-OutputArea-output style")
        left = {item.text.split()[0]: item.location["x"] for item in reversed(summaries)}
        assert left["TensorDict"] < left["label"] == left["meta"] < left["weight"]
        kept(browser, "of-others")
        browser.get("about:blank")
