"""Analyses and rewrites of jaxprs.

Read `interpreter` first: it has the rules of calls and control flow, for every analysis and rewrite.

* Analyses: `replication` proves which results of a traced replica function are replicated, and `origins` finds the inputs and
  collectives that each is computed from. `equivalence` compares a function on N replicas with one device, with the rules in
  `relation_rules`; `counterexamples` evaluates both (`numpy_evaluation`). `accumulators`, `unchanged` and `flops` are smaller.
* Warnings about likely mistakes: `batch_check`, `clip_check`, `count_check` and `example_check`.
* Rewrites: `single_replica`, `virtual_replicas`, `wide_reductions` and `ordered_calls` trace a jaxpr anew; `update_partition`,
  `server_partition` and `table_rows` split a step for an update on the host or on parameter servers.
* Descriptions for reports and errors: `mapped_functions`, `program_fingerprint`, `collective_lines` and `trace_errors`.

`primitives` and `marks` have the names of the primitives, values and calls that these modules recognize, and `causes` the
chains of operations that explain a result.
"""
