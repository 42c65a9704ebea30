"""Metrics whose states merge exactly over batches and replicas."""

from typing import TYPE_CHECKING

from jdist._src.core.migration_hints import missing_attribute_error as _missing_attribute_error
from jdist._src.core.public_names import set_public_module as _set_public_module
from jdist._src.replica.metrics import F1 as F1
from jdist._src.replica.metrics import Accuracy as Accuracy
from jdist._src.replica.metrics import ConfusionMatrix as ConfusionMatrix
from jdist._src.replica.metrics import Mean as Mean
from jdist._src.replica.metrics import MeanAbsoluteError as MeanAbsoluteError
from jdist._src.replica.metrics import MeanSquaredError as MeanSquaredError
from jdist._src.replica.metrics import Metric as Metric
from jdist._src.replica.metrics import Sum as Sum
from jdist._src.replica.metrics import TopKAccuracy as TopKAccuracy
from jdist._src.training.foreign_metrics import adapt as adapt

_set_public_module(globals(), __name__)

if not TYPE_CHECKING:  # a type checker would then accept every name

    def __getattr__(name: str) -> object:
        raise _missing_attribute_error(__name__, name)


del TYPE_CHECKING


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
