import pathlib
import shutil

import jdist

# Sphinx reads pages from this folder only.
_folder = pathlib.Path(__file__).parent
shutil.copytree(_folder.parent / "examples" / "notebooks", _folder / "notebooks", dirs_exist_ok=True)

project = "jdist"
author = "the jdist authors"
copyright = f"2026, {author}"
version = release = jdist.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["jdist.css"]
default_role = "code"  # docstrings use single backticks for code
autodoc_typehints = "description"  # signatures stay on one line
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
napoleon_use_ivar = True  # attributes of dataclasses are documented once
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]
nb_execution_mode = "off"  # the notebooks contain their outputs
