"""Checks the built pages: every piece of inline code that is a public name is a link to its entry.

python docs/_ext/check_links.py docs/_build/html
"""

import html.parser
import pathlib
import sys
import zlib

import code_names

_HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Codes(html.parser.HTMLParser):
    """Collects the inline code of a page, outside of headings and signatures.

    Attributes:
        found: Per piece of code, its text, the target of the link around it, and whether it is in a column of
            another library.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str | None, bool]] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self._text: str | None = None
        self._titles: list[str] = []
        self._column = -1

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens an element."""
        if tag in _VOID:
            return
        self._open.append((tag, dict(attrs)))
        if tag == "table":
            self._titles = []
        elif tag == "th":
            self._titles.append("")
        elif tag == "tr":
            self._column = -1
        elif tag == "td":
            self._column += 1
        elif tag == "code" and self._is_inline():
            self._text = ""

    def _is_inline(self) -> bool:
        classes = (self._open[-1][1].get("class") or "").split()
        around = {tag for tag, _ in self._open[:-1]}
        is_content = any(attributes.get("role") == "main" or tag == "article" for tag, attributes in self._open)
        return "literal" in classes and is_content and not around & (_HEADINGS | {"pre", "dt", "th", "nav"})

    def handle_data(self, data: str) -> None:
        """Adds text to the open piece of code."""
        if self._text is not None:
            self._text += data
        if any(tag == "th" for tag, _ in self._open) and self._titles:
            self._titles[-1] += data

    def handle_endtag(self, tag: str) -> None:
        """Closes an element."""
        if tag in _VOID or not any(tag == name for name, _ in self._open):
            return
        if tag == "code" and self._text is not None:
            links = [attributes.get("href") for name, attributes in self._open if name == "a"]
            self.found.append((self._text, links[-1] if links else None, self._is_foreign()))
            self._text = None
        while self._open and self._open.pop()[0] != tag:
            pass

    def _is_foreign(self) -> bool:
        in_cell = any(tag == "td" for tag, _ in self._open)
        has_column = any("jdist" in title for title in self._titles)
        return in_cell and has_column and "jdist" not in self._titles[self._column]


def documented_names(folder: pathlib.Path) -> set[str]:
    """Returns the names of the built site's own inventory."""
    content = (folder / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" ")[0] for line in zlib.decompress(content).decode().splitlines() if " py:" in line}


def missing_links(folder: pathlib.Path) -> tuple[list[str], int]:
    """Returns the code that has no link to its entry, with the page, and the number of links that were checked."""
    problems, count = [], 0
    documented = documented_names(folder)
    for page in sorted(folder.rglob("*.html")):
        parser = Codes()
        parser.feed(page.read_text(encoding="utf-8"))
        for text, link, is_foreign in parser.found:
            is_list = page == folder / f"{code_names.LIST_OF_NAMES}.html"
            name = code_names.resolve(text, of_jdist=not is_foreign, all_of_jdist=is_list)
            if name is None:
                continue
            where = f"{page.relative_to(folder)}: `{text}`"
            count += 1
            if link is None:
                problems.append(f"{where} has no link to {name}")
            elif "#jdist." in link and link.partition("#")[2] != name and name in documented:
                problems.append(f"{where} has the link {link}, not #{name}")
    return problems, count


if __name__ == "__main__":
    lines, checked = missing_links(pathlib.Path(sys.argv[1]))
    print("\n".join(lines))
    print(f"{checked} names in code, {len(lines)} without the link to their entry")
    sys.exit(bool(lines) or checked < 1000)
