import pathlib
import shutil
import sys

import jdist

# Sphinx reads pages from this folder only.
_folder = pathlib.Path(__file__).parent
sys.path.insert(0, str(_folder / "_ext"))
shutil.copytree(_folder.parent / "examples" / "notebooks", _folder / "notebooks", dirs_exist_ok=True)

project = "jdist"
author = "the jdist authors"
copyright = f"2026, {author}"
version = release = jdist.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "api_links",  # in docs/_ext: inline code that is a public name becomes a link
]
exclude_patterns = ["_build", "_ext"]
html_theme = "furo"
html_title = "jdist"
html_logo = html_favicon = "_static/logo.svg"
html_theme_options = {
    "source_repository": "https://github.com/jdist/jdist/",
    "source_branch": "main",
    "source_directory": "docs/",
    "light_css_variables": {"color-brand-primary": "#1f6f8b", "color-brand-content": "#1f6f8b"},
    "dark_css_variables": {"color-brand-primary": "#7cc4dc", "color-brand-content": "#7cc4dc"},
}
html_static_path = ["_static"]
html_css_files = ["jdist.css"]
toc_object_entries_show_parents = "hide"
default_role = "code"  # docstrings use single backticks for code
autodoc_typehints = "description"  # signatures stay on one line
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
napoleon_use_ivar = True  # attributes of dataclasses are documented once
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
nb_execution_mode = "off"  # the notebooks contain their outputs
