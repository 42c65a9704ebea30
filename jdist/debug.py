"""Tools that find mistakes in programs: why a step is slow, wrong or not replicated.

`explain` shows the replication proof of a step. `find_slow_lines` finds lines of a loop that transfer or compile in each step.
`check_replicated` finds silent corruption. In a replica function, `print` shows values per replica. `checked` finds NaN,
indices out of bounds and divisions by zero, with the line of the user's code.
"""

from jdist._src.core.public_names import set_public_module as _set_public_module
from jdist._src.debug.checked import CheckError as CheckError
from jdist._src.debug.checked import checked as checked
from jdist._src.debug.copies import CopiesDifferError as CopiesDifferError
from jdist._src.debug.copies import Difference as Difference
from jdist._src.debug.copies import check_replicated as check_replicated
from jdist._src.debug.explain import explain as explain
from jdist._src.debug.explanation import Explanation as Explanation
from jdist._src.debug.explanation import LeafExplanation as LeafExplanation
from jdist._src.debug.printing import print as print
from jdist._src.debug.slow_lines import find_slow_lines as find_slow_lines

_set_public_module(globals(), __name__)


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
