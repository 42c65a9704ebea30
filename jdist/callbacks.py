"""Callbacks: what is done while training goes on, as functions of its events.

A callback of your own is a function: `lambda event: print(event.step) if event.moment is Moment.EPOCH else None`. It
may return an `Answer`, and remember things with `get_state` and `set_state`; see `jdist._src.training.events`. One that has a
method `close` has it called when training is over, however it ends.
"""

from jdist._src.callbacks.averages import EMA as EMA
from jdist._src.callbacks.checkpoint import Checkpoint as Checkpoint
from jdist._src.callbacks.learning_rate import learning_rate as learning_rate
from jdist._src.callbacks.learning_rate import learning_rate_of as learning_rate_of
from jdist._src.callbacks.logs import CSVLog as CSVLog
from jdist._src.callbacks.logs import JSONLog as JSONLog
from jdist._src.callbacks.profiling import Profile as Profile
from jdist._src.callbacks.progress import progress as progress
from jdist._src.callbacks.stopping import EarlyStopping as EarlyStopping
from jdist._src.callbacks.stopping import time_limit as time_limit
from jdist._src.callbacks.tensorboard import TensorBoard as TensorBoard
from jdist._src.training.events import Callback as Callback
from jdist._src.training.events import CallbackResult as CallbackResult
from jdist._src.training.events import Event as Event
from jdist._src.training.events import Moment as Moment


def __dir__() -> list[str]:
    return sorted(name for name in globals() if not name.startswith("_"))
