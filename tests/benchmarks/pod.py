"""The additional cost of a pod over one host: sending each host's rows, and agreeing before and after each step.

    python tests/benchmarks/pod.py

Processes of one machine act as the hosts (`tests/pod/`). Each computes the work of all cores, so the time of a whole
step means nothing. Only the host's own work can be measured: agreeing over sockets, and sending rows.
"""

import datetime
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
from engine import HERE, machine
from pods import Pod

CODE = """
import json, statistics, sys
from time import perf_counter
import torch
import tpufit
from tpufit.backend import Sharding
from tpufit.hosts import all_reduce_max, note_place
from tpufit.runtime import make_placement, send_rows, get_settled_cores, to_device
from tpufit.runtime.pending_tensors import wait

tpufit.init()
placement = make_placement(get_settled_cores())
me, shards = tpufit.process_index(), placement.local_shards

def median(call, times=300):
    took = []
    for _ in range(times):
        began = perf_counter()
        call()
        took.append(perf_counter() - began)
    return 1e3 * statistics.median(took)

found = {"agree": median(lambda: all_reduce_max([1, -1, 32, -32]))}
for rows, width in ((128, 784), (256, 3 * 224 * 224)):
    whole = torch.randn(rows, width)
    if placement.hosts == 1:
        send = lambda: to_device([whole], placement, Sharding.ROWS)
    else:
        own = whole[: rows * len(shards) // placement.count].clone()
        send = lambda: send_rows([own], rows, placement)
    found[f"send {rows} x {width}"] = median(send, 30)

# A small convolutional net: a step of a fit, and the agreements that it needs.
from torch import nn
from tpufit.hosts import group as hosts

count, agree_of = [0], hosts.Group.all_reduce_max

def counted(*arguments):
    count[0] += 1
    return agree_of(*arguments)

hosts.Group.all_reduce_max = counted
torch.manual_seed(0)
x, y = torch.randn(4096, 1, 28, 28), torch.randint(0, 10, (4096,))
convs = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
model = tpufit.Model(nn.Sequential(*convs, nn.Flatten(), nn.Linear(9216, 10)))
model.compile("sgd", "cross_entropy", metrics=["accuracy"])
model.fit(x, y, batch_size=16, verbose=0)
count[0], began = 0, perf_counter()
model.fit(x, y, batch_size=16, verbose=0)
found["step"], found["agreements per step"] = 1e3 * (perf_counter() - began) / 64, count[0] / 64
json.dump(found, open(f"found{me}.json", "w"))
"""

if __name__ == "__main__":
    report: dict[str, Any] = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat()}
    report |= {"machine": machine(), "load": os.getloadavg()[0], "milliseconds": {}}
    for hosts, cores in ((1, 4), (2, 2), (4, 1)):
        with tempfile.TemporaryDirectory() as folder:
            ended = Pod(hosts, cores, Path(folder)).run(CODE)
            assert [host.code for host in ended] == [0] * hosts, ended[0].err
            found = [json.loads(Path(folder, f"found{host}.json").read_text()) for host in range(hosts)]
        slowest = {name: round(max(f[name] for f in found), 3) for name in found[0]}
        report["milliseconds"][f"{hosts} x {cores}"] = slowest
        print(f"{hosts} hosts x {cores} cores, ms: {slowest}")
    (HERE / "results" / "pod.json").write_text(json.dumps(report, indent=1) + "\n")
