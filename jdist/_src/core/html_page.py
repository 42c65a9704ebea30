"""Self-contained HTML pages: they load nothing and run no script, and follow the light or dark scheme of the screen."""

import datetime
import html
import importlib.resources
from collections.abc import Mapping, Sequence

from jdist._src.core.rendering import printable

# Also if a metric name contains markup.
_CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# On light and on dark paper. All light colors differ, because `figure_as_svg` replaces each by a CSS variable. The hues are
# distinguishable with color blindness.
COLORS = {
    "paper": ("#fefefe", "#16191d"),
    "ink": ("#3c434b", "#c6ccd3"),
    "muted": ("#6a727b", "#949da7"),
    "grid": ("#e6e8eb", "#2a3036"),
    "bad": ("#c8102e", "#ff6b7d"),
    "loss": ("#2364aa", "#6fb1f5"),
    "metric-0": ("#0f8265", "#45c4a0"),
    "metric-1": ("#b8551a", "#f0935a"),
    "metric-2": ("#8a4a9e", "#cb93de"),
    "metric-3": ("#8f6f00", "#d9b63c"),
    "metric-4": ("#a33a5e", "#ef88aa"),
}
# The background, the text and the borders on light and dark; the other colors come from the charts.
_PAGE_COLORS = {"ground": ("#f5f6f7", "#0e1013"), "text": ("#1c2126", "#e4e7eb"), "line": ("#e2e5e9", "#272c32")}


def html_page(title: str, lead: Sequence[str], sections: Mapping[str, str]) -> str:
    """Returns a self-contained HTML page.

    Args:
        title: Its heading.
        lead: Paragraphs below the heading.
        sections: The HTML of each section by its heading.
    """
    content = "\n".join(
        f'<section><h2>{escaped(name)}</h2>\n<div tabindex="0">{content}</div></section>'
        for name, content in sections.items()
    )
    written = f"Written {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC by jdist."
    paragraphs = "".join(f"<p>{escaped(text)}</p>" for text in (*lead, written))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_SECURITY_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escaped(title)}</title>\n'
        f"<style>\n{_style()}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{escaped(title)}</h1>{paragraphs}</header>\n"
        f"{content}\n</main>\n</body>\n</html>\n"
    )


def escaped(text: str) -> str:
    """Returns a text for HTML, on one line."""
    return html.escape(printable(text, 10_000))


def _style() -> str:
    """Returns the style sheet with the color variables for light and dark screens; paper is light."""
    colors = COLORS | _PAGE_COLORS
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in colors.items()) for i in (0, 1))
    sheet = importlib.resources.files("jdist._src.core").joinpath("page.css").read_text(encoding="utf-8")
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{sheet}"
    )
