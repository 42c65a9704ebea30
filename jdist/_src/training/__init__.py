"""The Trainer: `fit`, `evaluate` and `predict`.

Read `trainer` first, then `loop` and `steps`. Events and history are records that callbacks and reports use.
"""
