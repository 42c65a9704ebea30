"""Data sets: sources, the order of examples, the split over processes and replicas, batches, and prefetching.

Read `distribute` first: it makes a `DistributedDataset` of the arguments of `strategy.distribute_dataset`. A source is adapted
by `source_adapters`, its batches are read by `batches` with one reader per shard (`shard_readers`), and `dataset` transfers
them to the devices, ahead of the step (`prefetch`).
"""
