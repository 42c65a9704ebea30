"""Exit statuses with a meaning for the launcher, and for other programs that start processes again."""

PREEMPTED = 42  # a checkpoint was saved after a signal that ends the job; the status of TensorFlow's handler
HUNG = 43  # a step, a collective or a barrier took longer than its time limit
