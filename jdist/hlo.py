"""Collectives of compiled programs, and the bytes that they send."""

from jdist._src.devices.hlo import Collective as Collective
from jdist._src.devices.hlo import collectives as collectives
