"""Tools that explain programs and find mistakes in them."""

from jdist._src.core.public_names import set_public_module as _set_public_module
from jdist._src.debug.explain import explain as explain
from jdist._src.debug.explanation import Explanation as Explanation
from jdist._src.debug.explanation import LeafExplanation as LeafExplanation
from jdist._src.debug.slow_lines import find_slow_lines as find_slow_lines

_set_public_module(globals(), __name__)


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
