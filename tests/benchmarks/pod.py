"""What a pod costs beside one host: feeding own rows, and agreeing before and after each step.

    python tests/benchmarks/pod.py

Pods are played by processes of one machine (`tests/pod/`), each of which computes what all cores do, so the time of a
whole step says nothing. What can be measured is the host's own work: to agree over sockets, and to send rows.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
from pods import Pod

CODE = """
import json, statistics, sys
from time import perf_counter
import torch
import tpufit
from tpufit.runtime import Placement, Sharding, agree, at, send_rows, settled, to_device
from tpufit.runtime.lazy import wait

tpufit.init()
placement = Placement(settled())
me, shards = tpufit.process_index(), placement.local_shards

def median(call, times=300):
    took = []
    for _ in range(times):
        began = perf_counter()
        call()
        took.append(perf_counter() - began)
    return 1e3 * statistics.median(took)

found = {"agree": median(lambda: agree([1, -1, 32, -32]))}
for rows, width in ((128, 784), (256, 3 * 224 * 224)):
    whole = torch.randn(rows, width)
    if placement.hosts == 1:
        send = lambda: to_device([whole], placement, Sharding.ROWS)
    else:
        own = whole[: rows * len(shards) // placement.count].clone()
        send = lambda: send_rows([own], rows, placement)
    found[f"send {rows} x {width}"] = median(send, 30)
json.dump(found, open(f"found{me}.json", "w"))
"""

if __name__ == "__main__":
    for hosts, cores in ((1, 4), (2, 2), (4, 1)):
        with tempfile.TemporaryDirectory() as folder:
            ended = Pod(hosts, cores, Path(folder)).run(CODE)
            assert [host.code for host in ended] == [0] * hosts, ended[0].err
            found = [json.loads(Path(folder, f"found{host}.json").read_text()) for host in range(hosts)]
        print(
            f"{hosts} hosts x {cores} cores, ms: ", {name: round(max(f[name] for f in found), 3) for name in found[0]}
        )
