import sys
import time
import collections
sys.path[:0] = ["/tmp/h3/tests/kit"]
import os
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
import traceback
import random_steps as rs
start, end = int(sys.argv[1]), int(sys.argv[2])
T = collections.Counter(); C = collections.Counter(); O = collections.Counter(); E = 0
for seed in range(start, end):
    p = rs.random_program(seed)
    try:
        t0 = time.perf_counter()
        l1, l2 = [], []
        local = p.trace(p.num_replicas, l1); t1 = time.perf_counter()
        whole = p.trace(1, l2); t2 = time.perf_counter()
        assert l1 == l2
        truths = rs.true_relations(p, local, whole); t3 = time.perf_counter()
        T["local"] += t1-t0; T["whole"] += t2-t1; T["truth"] += t3-t2
        T["eqns"] += len(local.eqns)
        C.update(t.kind for t in truths)
        O.update(x.split()[0] for x in l1)
    except Exception:
        E += 1
        print("SEED", seed, "\n".join(l1)); traceback.print_exc(limit=-3)
        if E > 5: break
n = end - start
print({k: round(v / n * 1000, 1) for k, v in T.items()}, C, O.most_common())
