"""Collectives of compiled programs, and the bytes that they send."""

from jdist._src.core.public_names import set_public_module as _set_public_module
from jdist._src.devices.hlo import Collective as Collective
from jdist._src.devices.hlo import collectives as collectives

_set_public_module(globals(), __name__)


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
