"""The progress display of `Trainer.fit`.

Read `display_callback` first: it is the callback that measures rates. `displays` writes them to a terminal, a file or a
notebook.
"""
