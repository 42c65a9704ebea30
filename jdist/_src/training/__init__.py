"""The `Trainer`: `fit`, `evaluate` and `predict` under any strategy.

`trainer` prepares a run: `step_inputs` draws batches and groups them by calls, `steps` holds the replica functions, `resume`
finds the state to start with. `loop` then calls the step per group, sends `events` to the callbacks, and returns a `fit`. The
adapters accept models, losses and metrics of other libraries; `report` draws the history.

Read `trainer` first, then `loop` and `steps`.
"""
