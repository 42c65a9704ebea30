"""Callbacks: what is done while training goes on, as functions of its events.

A callback of your own is a function: `lambda event: print(event.step) if event.moment is Moment.EPOCH else None`. It
may return an `Answer`, and remember things with `get_state` and `set_state`; see `jdist.training.events`. One that has a
method `close` has it called when training is over, however it ends.
"""

from jdist.callbacks.averages import EMA as EMA
from jdist.callbacks.logs import CSVLog as CSVLog
from jdist.callbacks.logs import JSONLog as JSONLog
from jdist.callbacks.profiling import Profile as Profile
from jdist.callbacks.progress import progress as progress
from jdist.callbacks.rates import learning_rate as learning_rate
from jdist.callbacks.rates import learning_rate_of as learning_rate_of
from jdist.callbacks.saving import Checkpoint as Checkpoint
from jdist.callbacks.stopping import EarlyStopping as EarlyStopping
from jdist.callbacks.stopping import time_limit as time_limit
from jdist.callbacks.tensorboard import TensorBoard as TensorBoard
from jdist.training.events import Answer as Answer
from jdist.training.events import Callback as Callback
from jdist.training.events import Event as Event
from jdist.training.events import Moment as Moment
