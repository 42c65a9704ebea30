"""The loop over the steps, and what is seen, kept and said of it."""
