"""`Host`: this host's number and the number of hosts, from the environment variables of torchrun or a pod."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed import Store
from torch.distributed.rendezvous import rendezvous

from ...errors import StartError

# Each may have the number of a pod's host: from GKE, a launcher, or an indexed job of Kubernetes.
_HOST_NUMBER_VARIABLES = ("TPU_WORKER_ID", "NODE_RANK", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True)
class Host:
    """This process among the processes that run the script. Each of them drives some cores, so it is called a host.

    Attributes:
        index: Its number, from 0.
        count: The number of hosts.
        local_index: Its number among the hosts on its machine; torchrun may start several on one machine.
        local_count: The number of hosts on its machine.
        address: The address of process 0.
        port: The port of process 0's store.
        started_by: `"torchrun"` or `"a pod"`, or empty for a single host.
    """

    index: int = 0
    count: int = 1
    local_index: int = 0
    local_count: int = 1
    address: str = "localhost"
    port: int = 0
    started_by: str = ""

    def store(self) -> Store:
        """Return the store that all hosts share. **This waits** for all hosts."""
        where = f"tcp://{self.address}:{self.port}?rank={self.index}&world_size={self.count}"
        store: Store = next(iter(rendezvous(where)))[0]
        return store


def find_host(environ: Mapping[str, str] = os.environ) -> Host:
    """Return this process's host, from the variables that torchrun or a pod sets.

    Raises:
        StartError: A variable is missing.

    Example:
        >>> find_host({"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}).address
        't0'
    """
    hosts = [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    if int(environ.get("WORLD_SIZE", "1")) > 1:
        wanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in wanted if name not in environ]:
            raise StartError(
                f"WORLD_SIZE={environ['WORLD_SIZE']} says that this is one of several processes, but {missing[0]} "
                "isn't set. Start the processes with torchrun, which sets it, or unset WORLD_SIZE"
            )
        *numbers, address, port = (environ[name] for name in wanted)
        index, count, local_index, local_count = map(int, numbers)
        return Host(index, count, local_index, local_count, address, int(port), "torchrun")
    if len(hosts) > 1:
        number = next((environ[name] for name in _HOST_NUMBER_VARIABLES if name in environ), None)
        if number is None:
            raise StartError(
                f"TPU_WORKER_HOSTNAMES names {len(hosts)} hosts, but no variable has this host's number. Set "
                "TPU_WORKER_ID to the number, from 0, or unset TPU_WORKER_HOSTNAMES to compute on this host alone"
            )
        address, port = environ.get("MASTER_ADDR", hosts[0]), environ.get("MASTER_PORT", "29500")
        return Host(int(number), len(hosts), address=address, port=int(port), started_by="a pod")
    return Host()
