"""Synchronisation policies: optax gradient transformations that say when and how the replicas agree.

The step stays as it is, `tx.update(grads, opt_state, params)` with each replica's own gradients; the policy is one argument:

    tx = optax.chain(jdist.sync.mean(), optax.adamw(1e-3))
    tx = jdist.sync.every(4, optax.chain(jdist.sync.int8(), optax.adamw(1e-3)))
    tx = jdist.sync.diloco(optax.adamw(1e-3), every=50)

Make the state in `strategy.init`, which places what a policy keeps.
"""

from jdist.sync.accumulation import every as every
from jdist.sync.accumulation import skip_nonfinite as skip_nonfinite
from jdist.sync.drift import diloco as diloco
from jdist.sync.drift import local_sgd as local_sgd
from jdist.sync.low_rank import power_sgd as power_sgd
from jdist.sync.reduction import exact as exact
from jdist.sync.reduction import hierarchical as hierarchical
from jdist.sync.reduction import mean as mean
from jdist.sync.reduction import sum as sum
from jdist.sync.rounding import in_dtype as in_dtype
from jdist.sync.rounding import int8 as int8
from jdist.sync.scaling import dynamic_loss_scale as dynamic_loss_scale
from jdist.sync.sparsity import top_k as top_k
from jdist.sync.streaming import streaming_diloco as streaming_diloco
