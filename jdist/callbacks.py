"""Callbacks of `Trainer.fit`.

A callback is a subclass of `Callback`, or a function of an `Event`. It may return a `CallbackResult`, which stops training or
replaces the state. A subclass may also override `get_state` and `set_state`, whose data checkpoints store, and `close`.
"""

from typing import TYPE_CHECKING

from jdist._src.callbacks.averages import EMA as EMA
from jdist._src.callbacks.checkpoint import Checkpoint as Checkpoint
from jdist._src.callbacks.learning_rate import learning_rate as learning_rate
from jdist._src.callbacks.logs import CSVLog as CSVLog
from jdist._src.callbacks.logs import JSONLog as JSONLog
from jdist._src.callbacks.preemption import Preemption as Preemption
from jdist._src.callbacks.profiling import Profile as Profile
from jdist._src.callbacks.replication import CheckReplicated as CheckReplicated
from jdist._src.callbacks.rows import Rows as Rows
from jdist._src.callbacks.stopping import EarlyStopping as EarlyStopping
from jdist._src.callbacks.stopping import TimeLimit as TimeLimit
from jdist._src.callbacks.tensorboard import TensorBoard as TensorBoard
from jdist._src.core.call_errors import explain_constructor as _explain_constructor
from jdist._src.core.migration_hints import missing_attribute_error as _missing_attribute_error
from jdist._src.core.public_names import set_public_module as _set_public_module
from jdist._src.training.events import Callback as Callback
from jdist._src.training.events import CallbackResult as CallbackResult
from jdist._src.training.events import Event as Event
from jdist._src.training.events import Moment as Moment
from jdist._src.training.progress import Progress as Progress
from jdist._src.training.state import learning_rate_of as learning_rate_of

_PUBLIC_CLASSES = [
    EMA,
    Checkpoint,
    CheckReplicated,
    CSVLog,
    JSONLog,
    Preemption,
    Profile,
    Progress,
    Rows,
    EarlyStopping,
    TimeLimit,
    TensorBoard,
]
for _class in _PUBLIC_CLASSES:
    _explain_constructor(_class)

_set_public_module(globals(), __name__)

if not TYPE_CHECKING:  # a type checker would then accept every name

    def __getattr__(name: str) -> object:
        raise _missing_attribute_error(__name__, name)


del TYPE_CHECKING


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
