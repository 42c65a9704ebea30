"""Data sets: sources, their order, their division over processes and replicas, batches and prefetch.

Read `distribute` first: it builds a `DistributedDataset` from the arguments of `strategy.distribute_dataset`.
"""
