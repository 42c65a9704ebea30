import jdist

project = "jdist"
author = "the jdist authors"
copyright = f"2026, {author}"
version = release = jdist.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
myst_heading_anchors = 3
nb_execution_mode = "off"
