"""Keras' own `compile` and `fit` within `strategy.scope()`: data-parallel over the devices of the strategy.

The scope sets a `keras.distribution.DataParallel`, which Keras 3 uses on JAX: it replicates the variables that are created, and
splits each batch of `fit`, `evaluate` and `predict`. Keras is found in `sys.modules` and never imported here.
"""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jdist._src.core import jax_compat
from jdist._src.core.source_lines import warn_at_caller
from jdist._src.devices.dispatch import is_bounded


@contextlib.contextmanager
def keras_distribution(strategy: Any) -> Iterator[None]:
    """Distributes Keras over the devices of `strategy`, if Keras is imported, uses JAX and does not have a distribution yet.

    Raises:
        RuntimeError: In Keras' `fit`, if the devices are in several processes, or workers update the state.
        ValueError: On exit, if a batch after the first one cannot be split over the devices.

    Warns:
        UserWarning: Keras' `fit` runs on one device; or, at the exit, a model was compiled in this scope and not trained in it.
    """
    was_imported = "keras" in sys.modules
    keras = _keras_on_jax()
    if keras is None or keras.distribution.distribution() is not None:
        yield
        if not was_imported and (keras := _keras_on_jax()) is not None and _has_optimizer(keras):
            if reason := _reason_against_fit(strategy):
                raise RuntimeError(_NO_FIT.format(reason))
            warn_at_caller(_IMPORTED_INSIDE)
        return
    distribution = _data_parallel(
        keras, strategy.devices, _reason_for_one_device(strategy), _reason_against_fit(strategy)
    )
    keras.distribution.set_distribution(distribution)
    try:
        yield
    except ValueError as error:
        if "incompatible devices for jitted computation" in str(error):
            error.add_note(_BUILT_OUTSIDE)
        if "array axis 0 is partitioned" not in str(error) or not distribution.has_data:
            raise
        raise ValueError(_UNEVEN_BATCH.format(len(strategy.devices), _TRAINER)) from error
    finally:
        keras.distribution.set_distribution(None)
    if distribution.has_optimizer and not distribution.has_data:
        warn_at_caller(_NOT_TRAINED_INSIDE)


def _data_parallel(
    keras: Any, devices: Sequence[jax.Device], reason_for_one_device: str | None, reason_against_fit: str | None
) -> Any:
    """Returns a `keras.distribution.DataParallel` that records its use, and replicates batches if it cannot split the first."""
    layout = keras.distribution.TensorLayout

    class ScopeDistribution(keras.distribution.DataParallel):
        has_optimizer = False
        has_data = False

        def get_variable_layout(self, variable: Any) -> Any:
            self.has_optimizer |= variable.path.endswith("iteration")  # the counter that each optimizer creates
            return super().get_variable_layout(variable)

        def get_data_layout(self, data_shape: Sequence[int]) -> Any:
            if reason_against_fit and _is_training():
                raise RuntimeError(_NO_FIT.format(reason_against_fit))
            is_first, self.has_data = not self.has_data, True
            if is_first and reason_for_one_device:
                warn_at_caller(f"Keras' own `fit` runs on one device: {reason_for_one_device} {_TRAINER}")
            num_devices = self.device_mesh.devices.size
            if data_shape[0] % num_devices == 0:
                return super().get_data_layout(data_shape)
            if is_first:
                warn_at_caller(
                    f"A batch of {data_shape[0]} examples cannot be split over {num_devices} devices, so each device computes "
                    f"all of it. Use a multiple of {num_devices} as `batch_size`. {_TRAINER}"
                )
            return layout([None] * len(data_shape), self.device_mesh)

    chosen = jax.local_devices()[:1] if reason_for_one_device else devices
    return ScopeDistribution(devices=list(chosen), auto_shard_dataset=False)


def _reason_for_one_device(strategy: Any) -> str | None:
    if len({device.process_index for device in strategy.devices}) > 1:
        return "the devices of this strategy belong to several processes, and Keras would expect other data on each of them."
    if jax_compat.KERAS_ABORTS_ON_CPU and is_bounded(strategy.mesh):
        return "on several CPU devices, JAX before 0.11 blocks in loops that do not wait for each step."
    return None


def _reason_against_fit(strategy: Any) -> str | None:
    if len({device.process_index for device in strategy.devices}) > 1:
        return "trains a separate model on each process: it does not reduce gradients over processes"
    if strategy._context.is_asynchronous:
        return "does not use the workers and the servers of a `ParameterServerStrategy`"
    return None


def _is_training() -> bool:
    """Whether a function of Keras that changes weights is running."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in ("fit", "train_on_batch") and _KERAS in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _keras_on_jax() -> Any:
    """Returns the module `keras`, if it is imported completely, is Keras 3 and computes with JAX; else None."""
    keras = sys.modules.get("keras")
    is_keras_3 = hasattr(keras, "distribution") and hasattr(keras, "config")
    return keras if keras is not None and is_keras_3 and keras.config.backend() == "jax" else None


def _has_optimizer(keras: Any) -> bool:
    return any(isinstance(one, keras.optimizers.Optimizer) for one in gc.get_objects())


_KERAS = f"{os.sep}keras{os.sep}"
_TRAINER = "`jdist.Trainer(model, optimizer, loss, strategy=strategy)` trains the same model on all devices."
_NO_FIT = "In `strategy.scope()`, Keras' own `fit` {}. " + _TRAINER
_UNEVEN_BATCH = (  # Keras chooses one layout for all batches of an epoch, by the first one
    "Keras cannot split a batch of an epoch over the {0} devices of `strategy.scope()`, in general the last one. Use a "
    "multiple of {0} as `batch_size`, and a multiple of {0} examples: `x[:len(x) // {0} * {0}]`. {1} It pads the last batch."
)
_BUILT_OUTSIDE = (
    "A Keras model that was built outside `strategy.scope()` has its variables on one device. Build and compile it inside the "
    "scope. " + _TRAINER
)
_IMPORTED_INSIDE = (
    "Keras was imported inside `strategy.scope()`, so its `fit` ran on one device. Import `keras` before the scope. "
    + _TRAINER
)
_NOT_TRAINED_INSIDE = (
    "A Keras model was compiled inside `strategy.scope()` and not trained in it. Outside the scope, `fit` computes each batch "
    "on every device: move the calls of `fit`, `evaluate` and `predict` into the scope. " + _TRAINER
)
