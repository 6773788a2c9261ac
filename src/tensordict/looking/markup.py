"""Build pieces of HTML: escaped text, readable sizes and numbers, and the style sheet; used by trees and reports."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def escape(value: object) -> str:
    """Escape the text of a value for HTML."""
    return html.escape(printable(str(value)))


def printable(text: str) -> str:
    """Escape the characters that XML and terminals cannot hold; line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def span(name: str, text: object) -> str:
    """Return a `<span>` of the class `td-name` with this text."""
    return f'<span class="td-{name}">{escape(text)}</span>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], name: str = "") -> str:
    """Return an HTML table of text cells."""
    cells = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="td-table {name}"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'


def picture(url: str, title: str) -> str:
    """Return an `<img>` for a data URL."""
    return f'<img src="{html.escape(url)}" alt="{escape(title)}" title="{escape(title)}"/>'


def shorten(text: str, most: int) -> str:
    """Cut a text after `most` characters, and say how many were cut."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def size_text(nbytes: float) -> str:
    """Format a number of bytes with its unit."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"


def count_text(count: int, what: str) -> str:
    """Format a count with its noun, which gets a plural "s" unless the count is 1."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def number_text(value: object) -> str:
    """Format a number with at most five digits; integers keep all of theirs."""
    if isinstance(value, complex):
        return f"{value:.4g}"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


# Every class begins with `td-`, so that it cannot clash with the classes of the notebook. The colors come from the
# theme of the notebook. Without one, they are light or dark, as the page says, or else as the system prefers.
def _color_variables(text: str, quiet: str, back: str, over: str, line: str) -> str:
    return f"""
  --td-text: var(--jp-content-font-color1, var(--vscode-editor-foreground, {text}));
  --td-quiet: var(--jp-content-font-color2, var(--vscode-descriptionForeground, {quiet}));
  --td-back: var(--jp-layout-color0, var(--vscode-editor-background, {back}));
  --td-over: var(--jp-layout-color2, var(--vscode-list-hoverBackground, {over}));
  --td-line: var(--jp-border-color2, var(--vscode-panel-border, {line}));"""


_LIGHT = "--td-blue: #0b5cad; --td-green: #1a6b35; --td-red: #b3261e; --td-bar: #3b7dd8;" + _color_variables(
    "#1f2328", "#59636e", "#ffffff", "#eef1f4", "#d1d9e0"
)
_DARK = "--td-blue: #79b8ff; --td-green: #7bd88f; --td-red: #ff8a80; --td-bar: #5a9bf0;" + _color_variables(
    "#e6edf3", "#9198a1", "#0d1117", "#1c2430", "#3d444d"
)
# Marks of a page with a theme: JupyterLab, VS Code (twice), Sphinx and others, Colab.
_LIGHT_PAGES = """[data-jp-theme-light="true"], .vscode-light, .vscode-high-contrast-light,
  [data-theme="light"], [theme="light"]"""
_DARK_PAGES = """[data-jp-theme-light="false"], .vscode-dark,
  .vscode-high-contrast:not(.vscode-high-contrast-light), [data-theme="dark"], [theme="dark"]"""
STYLE = f"""
.tensordict {{ {_LIGHT}
  color: var(--td-text); background: var(--td-back); font: 13px/1.5 system-ui, sans-serif; max-width: 62em;
  padding: 2px 4px; }}
@media (prefers-color-scheme: dark) {{ .tensordict {{ {_DARK} }} }}
:is({_LIGHT_PAGES}) .tensordict {{ {_LIGHT} }}
:is({_DARK_PAGES}) .tensordict {{ {_DARK} }}
.tensordict summary {{ cursor: pointer; list-style: none; border-radius: 3px; padding: 1px 6px 1px 0; }}
.tensordict summary::-webkit-details-marker {{ display: none; }}
.tensordict summary:hover {{ background: var(--td-over); }}
.tensordict summary::before {{ content: "▸"; color: var(--td-quiet); display: inline-block; width: 1.1em; }}
.tensordict details[open] > summary::before {{ content: "▾"; }}
.tensordict .td-node > summary::before {{ margin-right: 0.6em; }}
.tensordict .td-node > summary .td-kind:first-child {{ font-weight: 600; color: var(--td-text); }}
.tensordict .td-node > summary .td-size {{ margin-left: 0.6em; }}
.tensordict .td-leaf > summary {{ display: grid; align-items: baseline; column-gap: 0.6em;
  grid-template-columns: 1.1em minmax(7em, 1fr) 7em minmax(9em, 1.2fr) 5em 6em 10em; }}
.tensordict .td-entries {{ margin-left: 0.35em; border-left: 1px solid var(--td-line); }}
.tensordict .td-body {{ padding: 2px 6px 8px 1.7em; overflow-x: auto; }}
.tensordict .td-key {{ font-weight: 600; overflow-wrap: anywhere; }}
.tensordict .td-kind, .tensordict .td-device, .tensordict .td-facts, .tensordict .td-note {{ color: var(--td-quiet); }}
.tensordict .td-dtype {{ color: var(--td-blue); }}
.tensordict .td-shape, .tensordict .td-values {{ font-family: ui-monospace, monospace; font-size: 12px; }}
.tensordict .td-more {{ color: var(--td-quiet); white-space: nowrap; }}
.tensordict .td-size {{ text-align: right; white-space: nowrap; }}
.tensordict .td-node > summary .td-size {{ color: var(--td-quiet); }}
.tensordict .td-values {{ overflow-wrap: anywhere; }}
.tensordict .td-preview {{ grid-column: 5 / -1; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }}
.tensordict .td-name {{ color: var(--td-quiet); margin-right: 0.3em; }}
.tensordict .td-figure {{ margin-right: 1.2em; white-space: nowrap; }}
.tensordict .td-bad {{ color: var(--td-red); }}
.tensordict .td-text {{ white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace;
  font-size: 12px; }}
.tensordict .td-table {{ border-collapse: collapse; text-align: left; margin: 4px 0; font-size: 12px; }}
.tensordict .td-table th, .tensordict .td-table td {{ padding: 2px 10px 2px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--td-line); overflow-wrap: break-word; background: none; color: inherit; }}
.tensordict .td-table td:last-child {{ overflow-wrap: anywhere; }}
.tensordict .td-table th {{ color: var(--td-quiet); font-weight: 600; }}
.tensordict img {{ height: 72px; margin: 3px 4px 3px 0; image-rendering: pixelated; border: 1px solid var(--td-line);
  display: inline-block; max-width: 100%; }}
"""
