"""The documentation site: every public name is on it once, no link is dead, and it works in a browser."""

from __future__ import annotations

import importlib
import pathlib
import urllib.parse
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

import tensordict

pytestmark = pytest.mark.seconds

KEPT = pathlib.Path(__file__).parents[2] / "build" / "screenshots"
MODULES = [
    "tensordict",
    "tensordict.nn",
    "tensordict.datasets",
    "tensordict.store",
    "tensordict.llm",
    "tensordict.errors",
    "tensordict.utils",
]


# --- names ------------------------------------------------------------------------------------------------------------


def test_every_public_name_is_documented(site: pathlib.Path) -> None:
    """Twice is an error of the build."""
    public = {
        f"{module}.{name}"
        for module in MODULES
        for name in importlib.import_module(module).__all__
        if not name.startswith("_")
    }
    public |= {f"tensordict.TensorDictBase.{name}" for name in dir(tensordict.TensorDictBase) if name[0] != "_"}
    documented = inventory(site)
    assert sorted(public - documented.keys()) == []
    # All other documented names are members of public classes.
    others = {name.rpartition(".")[0] for name in documented.keys() - public}
    assert sorted(others - public) == []


def test_an_operation_is_on_the_page_of_its_family(site: pathlib.Path) -> None:
    documented = inventory(site)
    assert documented["tensordict.TensorDictBase.reshape"].startswith("operations/shape.html#")
    assert documented["tensordict.nn.TensorDictModule"].startswith("reference/nn.html#")
    assert documented["tensordict.TensorDictStore.td_id"].startswith("reference/store.html#")


def test_documented_names_link_to_their_source(site: pathlib.Path) -> None:
    for page, link in (
        ("operations/shape", "../_modules/tensordict/ops/dims/shape.html#TensorDictBase.reshape"),
        ("reference/functions", "../_modules/tensordict/containers/free_functions.html#stack"),
    ):
        assert link in parsed(site / f"{page}.html").links


def inventory(site: pathlib.Path) -> dict[str, str]:
    """The documented names of Python, and where each is."""
    data = (site / "objects.inv").read_bytes()
    lines = zlib.decompress(data[data.index(b"zlib.\n") + len(b"zlib.\n") :]).decode().splitlines()
    entries = [line.split(" ", 4) for line in lines]
    # Sphinx records the source as another name with priority -1.
    found = {name: place for name, kind, priority, place, _ in entries if kind[:3] == "py:" and priority != "-1"}
    assert len(found) > 700
    return found


# --- links ------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collect the links of a page, and the targets in it."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def parsed(path: pathlib.Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    return page


def test_no_link_is_dead(site: pathlib.Path) -> None:
    # The theme keeps a template of its own among its files.
    pages = {path: parsed(path) for path in site.rglob("*.html") if path.parent.name != "_static"}
    assert len(pages) > 100
    dead = []
    for path, page in pages.items():
        for link in page.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            anchor = urllib.parse.unquote(url.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert sorted(dead) == []


# --- in a browser -----------------------------------------------------------------------------------------------------

Open = Callable[..., webdriver.Chrome]


@pytest.fixture
def open_page(browser: webdriver.Chrome, address: str) -> Open:
    """Opens a page of the site: (path, dark, width and height) -> browser."""

    def opened(path: str, dark: bool = False, size: tuple[int, int] = (1280, 900)) -> webdriver.Chrome:
        # A window is never as narrow as a telephone.
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in media.items()]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get(f"{address}/{path}")
        return browser

    return opened


def keep(browser: webdriver.Chrome, name: str) -> None:
    """Save a picture of the page."""
    KEPT.mkdir(parents=True, exist_ok=True)
    assert browser.save_screenshot(str(KEPT / f"site-{name}.png"))
    print(KEPT / f"site-{name}.png")


def complaints(browser: webdriver.Chrome) -> list[Any]:
    """Return the errors in the pages since the last call."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def until(browser: webdriver.Chrome, selector: str) -> Any:
    """The first element that a selector finds, when it is there."""
    return WebDriverWait(browser, 30).until(
        lambda _: next(iter(browser.find_elements(By.CSS_SELECTOR, selector)), None)
    )


def shown(browser: webdriver.Chrome, selector: str) -> Any:
    """The first element that a selector finds and that is seen, for what there is twice, for narrow windows too."""
    return WebDriverWait(browser, 30).until(
        lambda _: next((one for one in browser.find_elements(By.CSS_SELECTOR, selector) if one.is_displayed()), None)
    )


def heading(browser: webdriver.Chrome) -> str:
    return until(browser, "article h1").text.rstrip("#")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize(
    "page",
    [
        "index",
        "guides/getting-started",
        "operations/index",
        "operations/indexing",
        "reference/nn",
        "reference/tensordict",
        "differences",
        "auto_gallery/index",
        "design/formats",
    ],
)
def test_pages_look_as_they_should(open_page: Open, address: str, page: str, width: int, dark: bool) -> None:
    browser = open_page(f"{page}.html", dark, (width, 900))
    assert heading(browser)
    keep(browser, f"{page.replace('/', '-')}-{width}-{'dark' if dark else 'light'}")
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in background.partition("(")[2].rstrip(")").split(",")[:3])
    assert (brightness < 200) if dark else (brightness > 600)
    # Wide tables and code scroll by themselves, never the page.
    assert browser.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0
    assert complaints(browser) == []
    urls = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [url for url in urls if not url.startswith((address, "data:"))] == []


def test_navigation(open_page: Open) -> None:
    browser = open_page("index.html")
    until(browser, "nav a[href*='reference/index']").click()
    assert heading(browser) == "API reference"
    browser.find_element(By.LINK_TEXT, "TensorDict").click()
    assert heading(browser) == "TensorDict"
    until(browser, "dt[id='tensordict.TensorDict'] a.reference[href*='_modules']").click()
    assert browser.current_url.endswith("_modules/tensordict/containers/dense.html#TensorDict")
    assert "class TensorDict" in until(browser, "[id='TensorDict']").text
    open_page("operations/index.html")
    browser.find_element(By.LINK_TEXT, "Shape").click()
    assert heading(browser) == "Shape"
    browser.find_element(By.LINK_TEXT, "td.reshape(12)").click()
    assert browser.current_url.endswith("#tensordict.TensorDictBase.reshape")
    assert complaints(browser) == []


def test_the_start_page_has_cards_the_version_and_the_source(open_page: Open) -> None:
    browser = open_page("index.html")
    until(browser, ".card-link p:first-child a")
    titles = [card.text for card in browser.find_elements(By.CSS_SELECTOR, ".card-link p:first-child a")]
    assert {"Install", "Ten minutes", "Guides by task", "Reference", "Gallery"} <= set(titles)
    assert tensordict.__version__ in until(browser, "article").text
    source = shown(browser, "a.version-and-source")
    assert tensordict.__version__ in source.text
    source.click()
    assert browser.current_url.endswith("_modules/index.html")
    open_page("index.html")
    shown(browser, ".card-link a").click()
    assert browser.current_url.endswith("guides/getting-started.html#install")
    assert complaints(browser) == []


def test_the_page_of_tensordict(open_page: Open) -> None:
    browser = open_page("reference/tensordict.html")
    signature = until(browser, "dt[id='tensordict.TensorDict']").text
    assert "batch_size: int | Sequence[int]" in signature and ": Any" not in signature
    groups = [group.text.rstrip("#") for group in browser.find_elements(By.CSS_SELECTOR, "article h3")]
    assert groups[:5] == ["Entries", "Batch dims", "Calculating", "Memory", "Saving"]
    links = {link.text for link in browser.find_elements(By.CSS_SELECTOR, "article table a")}
    assert {name for name in dir(tensordict.TensorDictBase) if name[0] != "_"} <= links
    browser.find_element(By.LINK_TEXT, "reshape").click()
    assert browser.current_url.endswith("operations/shape.html#tensordict.TensorDictBase.reshape")


def search(browser: webdriver.Chrome, words: str) -> list[str]:
    """Type words into the search box, and return the links that are found, the best one first."""
    shown(browser, "button.search-button__button").click()
    shown(browser, "[name=q]").send_keys(words, Keys.ENTER)
    # The summary comes last, when no more results are added.
    WebDriverWait(browser, 30).until(
        lambda _: "found" in (until(browser, "#search-results p.search-summary").text or "")
    )
    links = browser.find_elements(By.CSS_SELECTOR, "#search-results li a")
    return [link.get_attribute("href") for link in links]


@pytest.mark.parametrize(
    ("task", "guide"),
    [
        ("save a checkpoint", "guides/checkpoints.html#save-a-checkpoint"),
        ("resume training", "guides/checkpoints.html#resume-training"),
        ("add a column", "guides/containers.html#add-a-column-replace-it-remove-it"),
        ("pad a batch", "guides/ragged.html#pad-a-batch-to-equal-lengths"),
        ("filter rows", "guides/containers.html#filter-rows-select-columns"),
        ("export a model", "guides/compile.html#export-a-model-with-torch-export-or-onnx"),
        ("read from S3", "urls.html#read-from-s3-and-other-urls"),
        ("write from many processes", "datasets.html#write-from-many-processes"),
        ("convert from pandas", "tables.html#convert-from-pandas-arrow-polars-and-parquet"),
        ("which version is installed", "guides/terminal.html#see-which-version-is-installed"),
        ("checkpoint", "guides/checkpoints.html"),
        ("pandas", "tables.html"),
    ],
)
def test_the_search_finds_the_guide_of_a_task(open_page: Open, address: str, task: str, guide: str) -> None:
    found = search(open_page("index.html"), task)
    assert any(link.startswith(f"{address}/{guide}") for link in found[:3]), found[:5]


def test_search(open_page: Open) -> None:
    browser = open_page("index.html")
    links = search(browser, "repeat_interleave")
    found = until(browser, "#search-results li a")
    keep(browser, "search")
    assert any("operations/shape.html#tensordict.TensorDictBase.repeat_interleave" in link for link in links)
    found.click()
    assert "repeat_interleave" in until(browser, "article").text
    assert complaints(browser) == []


def test_the_colours_can_be_chosen(open_page: Open) -> None:
    browser = open_page("index.html")
    until(browser, "html[data-theme='light']")
    shown(browser, "button.theme-switch-button").click()
    shown(browser, "[data-mode='dark']").click()
    WebDriverWait(browser, 30).until(
        lambda _: browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    )
    browser.execute_script("localStorage.clear()")
