"""Checks at run time: copies of replicated values that differ, prints of replicas in order, and invalid operations.

`check_replicated` finds silent corruption. In a replica function, `print` shows values per replica. `checked` finds NaN,
indices out of bounds and divisions by zero, with the line of the user's code.
"""

from jdist._src.core.public_names import set_public_module as _set_public_module
from jdist._src.debug.checked import CheckError as CheckError
from jdist._src.debug.checked import checked as checked
from jdist._src.debug.copies import CopiesDifferError as CopiesDifferError
from jdist._src.debug.copies import Difference as Difference
from jdist._src.debug.copies import check_replicated as check_replicated
from jdist._src.debug.printing import print as print

_set_public_module(globals(), __name__)


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
