"""Collectives of compiled programs, and the bytes that they send."""

from jdist._src.devices.hlo import Collective as Collective
from jdist._src.devices.hlo import collectives as collectives


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
