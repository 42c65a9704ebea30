"""Test kit: runs tests under several strategies, and compares results with one device, between devices and bit for bit.

The functions import pytest and chex when they are called. The page "Testing" of the documentation has an example of each.
"""

from jdist._src.core.public_names import set_public_module as _set_public_module
from jdist._src.testing.comparison import assert_bitwise_equal as assert_bitwise_equal
from jdist._src.testing.comparison import assert_replicated as assert_replicated
from jdist._src.testing.debug import DebugStrategy as DebugStrategy
from jdist._src.testing.faults import InjectedFault as InjectedFault
from jdist._src.testing.faults import inject_fault as inject_fault
from jdist._src.testing.one_device import assert_same_as_one_device as assert_same_as_one_device
from jdist._src.testing.processes import Processes as Processes
from jdist._src.testing.processes import processes as processes
from jdist._src.testing.programs import assert_collectives as assert_collectives
from jdist._src.testing.programs import assert_no_transfer as assert_no_transfer
from jdist._src.testing.strategies import strategies as strategies
from jdist._src.testing.strategies import strategy as strategy
from jdist._src.testing.variants import variants as variants

_set_public_module(globals(), __name__)


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
