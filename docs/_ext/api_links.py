"""Sphinx extension: inline code that is a public name becomes a link to its API entry or to the site of its library.

The names of other libraries come from `external_names.txt`, without network: the extension writes one inventory file per
site, which `sphinx.ext.intersphinx` reads.
"""

import inspect
import pathlib
import re
import zlib

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.ext.napoleon import docstring
from sphinx.transforms.post_transforms import SphinxPostTransform

import code_names

# The module in which a class is defined, as autodoc prints it in annotations, with its public name.
PUBLIC = {
    "concurrent.futures._base.Future": "concurrent.futures.Future",
    "jax._src.mesh.Mesh": "jax.sharding.Mesh",
    "jax.P": "jax.sharding.PartitionSpec",
    "jax.jaxlib._jax.Array": "jax.Array",
    "jaxlib._jax.Device": "jax.Device",
    "jaxlib._jax.Sharding": "jax.sharding.Sharding",
    "jax._src.stages.Compiled": "jax.stages.Compiled",
    "jax._src.stages.Lowered": "jax.stages.Lowered",
    "optax._src.base.GradientTransformation": "optax.GradientTransformation",
    "optax._src.base.GradientTransformationExtraArgs": "optax.GradientTransformationExtraArgs",
}
# Headings of sections and tables, links, signatures.
_NOT_PROSE = (nodes.title, nodes.thead, nodes.reference, addnodes.pending_xref, addnodes.desc_signature)


def write_inventories(folder: pathlib.Path) -> dict[str, tuple[str, str]]:
    """Writes one inventory per site of the table of external names. Returns the value of `intersphinx_mapping`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {}
    mapping = {}
    for name, (site, address, role, path) in code_names.external_names().items():
        domain_role = f"std:{role}" if role == "doc" else f"py:{role}"
        lines.setdefault(site, []).append(f"{name} {domain_role} 1 {path} -\n")
        mapping[site] = (address, str(folder / f"{site}.inv"))
    for site, entries in lines.items():
        header = f"# Sphinx inventory version 2\n# Project: {site}\n# Version: \n# The rest is compressed using zlib.\n"
        content = header.encode() + zlib.compress("".join(sorted(entries)).encode())
        (folder / f"{site}.inv").write_bytes(content)
    return mapping


class ApiLinks(SphinxPostTransform):
    """Wraps each piece of inline code that `code_names.resolve` recognizes in a reference."""

    default_priority = 8  # before references are resolved

    def run(self, **kwargs: object) -> None:
        """Wraps the code of one page."""
        objects = self.env.domains.python_domain.objects
        pages = _pages_of_modules(objects)
        for xref in self.document.findall(addnodes.pending_xref):
            xref["reftarget"] = PUBLIC.get(xref.get("reftarget"), xref.get("reftarget"))
        for literal in [*self.document.findall(nodes.literal)]:
            if any(isinstance(parent, _NOT_PROSE) for parent in _parents(literal)):
                continue
            is_list = self.env.docname == code_names.LIST_OF_NAMES
            code = literal.astext()
            target = code_names.resolve(code, of_jdist=not _is_foreign(literal), all_of_jdist=is_list)
            if target is None:
                continue
            if target.startswith("jdist."):
                target = _documented(target, objects)
            attributes = {"refdomain": "py", "reftype": "obj", "reftarget": target, "refwarn": True}
            if target in pages:
                attributes |= {"refdomain": "std", "reftype": "doc", "reftarget": f"/{pages[target]}"}
            xref = addnodes.pending_xref("", refdoc=self.env.docname, refexplicit=True, **attributes)
            literal.replace_self(xref)
            xref += literal
            literal["classes"].append("xref")


def _parents(node: nodes.Node):
    while node.parent is not None:
        node = node.parent
        yield node


def _documented(name: str, objects: dict) -> str:
    """Returns `name`, the same member of a base class, or the class of a field that has no entry of its own."""
    candidates = [name, *code_names.inherited(name), name.rpartition(".")[0]]
    return next((candidate for candidate in candidates if candidate in objects), name)


def _pages_of_modules(objects: dict) -> dict[str, str]:
    """Returns the page of the API reference per public module of jdist."""
    pages: dict[str, str] = {}
    for name, entry in objects.items():
        module = name.rpartition(".")[0]
        if inspect.ismodule(code_names.public_names().get(module)):
            pages.setdefault(module, entry.docname)
    return pages


def _is_foreign(literal: nodes.literal) -> bool:
    """Returns whether `literal` is in a column of another library, in a table that has a column of jdist."""
    for cell in _parents(literal):
        if isinstance(cell, nodes.entry):
            group = next(parent for parent in _parents(cell) if isinstance(parent, nodes.tgroup))
            heads = next(group.findall(nodes.thead), nodes.thead())
            titles = [entry.astext() for entry in heads.findall(nodes.entry)]
            return any("jdist" in title for title in titles) and "jdist" not in titles[cell.parent.index(cell)]
    return False


def _sentences(section: docstring.GoogleDocstring, lines: list[str]) -> list[str]:
    return type(section)(section._dedent(lines), section._config).lines()


def _separate_plurals(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Ends the code in `array`s, which reStructuredText continues to the next backtick."""
    lines[:] = [re.sub(r"(?<![`\w])(`[^`]+`)(?=[a-z])", r"\1\\ ", line) for line in lines]


def _set_inventories(app: Sphinx, config: Config) -> None:
    config.intersphinx_mapping = write_inventories(pathlib.Path(app.doctreedir) / "inventories")


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the transform."""
    app.add_post_transform(ApiLinks)
    app.connect("config-inited", _set_inventories, priority=400)  # before intersphinx reads its setting
    app.connect("autodoc-process-docstring", _separate_plurals, priority=400)  # before napoleon
    # Types come from annotations. In the sentences of properties and of `Returns:` a colon does not separate a type.
    docstring.GoogleDocstring._consume_inline_attribute = lambda self: ("", _sentences(self, self._consume_to_end()))
    docstring.GoogleDocstring._consume_returns_section = lambda self, preprocess_types=False: [
        ("", "", _sentences(self, self._consume_to_next_section()))
    ]
    return {"parallel_read_safe": True, "parallel_write_safe": True}
