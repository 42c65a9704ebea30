"""The columns of a history: their names, and the prefix of the metrics of validation data."""

# The columns that are not metrics.
NON_METRIC_COLUMNS = (
    "epoch",
    "step",
    "seconds",
    "examples_per_second",
    "tokens_per_second",
    "mfu",
    "stalled_fraction",
    "skipped_steps",
    "dropped_examples",
    "learning_rate",
)
NORMS = ("gradient_norm", "update_norm", "parameter_norm")  # the columns of `fit(norms=True)`
VALIDATION_PREFIX = "val_"
