"""How long a simulation takes, over four decades of program length: seconds must grow like the number of actions.

    python benchmarks/simulator_speed.py
"""

import time

from ds_fold.plan import Cluster, Costs, Link, simulate
from ds_fold.schedule import Overlap, compute_order, lower

P = 8


def main() -> None:
    cluster = Cluster(hosts=2 * P, inter_host=Link(gbit_per_s=10, latency_s=5e-5))
    costs = Costs.uniform(P, 1, 1e-3, boundary_bytes=262144, trainable_bytes=1e7)
    print("| actions | steps until steady | s | us per action and step |\n|---|---|---|---|")
    for micro_batches in (1, 12, 120, 1200, 12000):
        program = lower(compute_order("1f1b", P, 1, micro_batches), 1, micro_batches, overlap=Overlap(reduce=True, gather=True))
        start = time.process_time()
        steps = len(simulate(program, costs, cluster, D=2).steps_s)
        seconds = time.process_time() - start
        each = 1e6 * seconds / program.num_actions / steps
        print(f"| {program.num_actions} | {steps} | {seconds:.4f} | {each:.2f} |", flush=True)


if __name__ == "__main__":
    main()
