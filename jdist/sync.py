"""Synchronization policies: optax gradient transformations that define when and how gradients are reduced over the replicas.

The step function does not change: it calls `tx.update(grads, opt_state, params)` with each replica's own gradients. The policy
is one argument of the optimizer:

    tx = optax.chain(jdist.sync.mean(), optax.adamw(1e-3))
    tx = jdist.sync.every(optax.chain(jdist.sync.int8(), optax.adamw(1e-3)), 4)
    tx = jdist.sync.diloco(optax.adamw(1e-3), every=50)

Make the state in `strategy.init`, which places the state of the policy.
"""

from typing import TYPE_CHECKING

from jdist._src.core.migration_hints import missing_attribute_error as _missing_attribute_error
from jdist._src.core.public_names import set_public_module as _set_public_module
from jdist._src.sync.accumulation import every as every
from jdist._src.sync.accumulation import skip_nonfinite as skip_nonfinite
from jdist._src.sync.delay import delay_compensation as delay_compensation
from jdist._src.sync.delay import scale_by_staleness as scale_by_staleness
from jdist._src.sync.local_updates import diloco as diloco
from jdist._src.sync.local_updates import local_sgd as local_sgd
from jdist._src.sync.local_updates import streaming_diloco as streaming_diloco
from jdist._src.sync.loss_scale import dynamic_loss_scale as dynamic_loss_scale
from jdist._src.sync.low_rank import power_sgd as power_sgd
from jdist._src.sync.quantization import in_dtype as in_dtype
from jdist._src.sync.quantization import int8 as int8
from jdist._src.sync.reduction import exact as exact
from jdist._src.sync.reduction import hierarchical as hierarchical
from jdist._src.sync.reduction import mean as mean
from jdist._src.sync.reduction import sum as sum
from jdist._src.sync.sparsity import top_k as top_k

_set_public_module(globals(), __name__)

if not TYPE_CHECKING:  # a type checker would then accept every name

    def __getattr__(name: str) -> object:
        raise _missing_attribute_error(__name__, name)


del TYPE_CHECKING


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
