"""The cores of this host, and the environment variables by which TorchTPU and libtpu select cores.

Both read the variables only once, at their start.
"""

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from itertools import chain

from ...errors import CoresError
from ...hosts import all_gather
from ...runtime.driver import CoresRequest
from ...utils import hardware
from .host import Host
from .private_names import names

_ADDRESSES, _TOPOLOGY = "TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY"


def count_cores() -> int:
    """Return the number of cores of this host's TPU; 0 without a TPU, where a plugin gives each process one core."""
    return sum(chip.devices for chip in hardware.find_chips())


def count_requested(request: CoresRequest, there: int) -> int:
    """Return the number of cores that a call requests.

    `"auto"` means all cores of a TPU. Another plugin gives each process a core, so without a TPU `"auto"` means one
    core, as on a CPU.

    Args:
        request: The requested cores.
        there: The number of cores of this host's TPU; 0 without a TPU.

    Raises:
        CoresError: This host doesn't have these cores.

    Example:
        >>> count_requested(CoresRequest(None, None), 8), count_requested(CoresRequest(None, None), 0)
        (8, 1)
        >>> count_requested(CoresRequest(4, None), 8), count_requested(CoresRequest(1, 3), 8)
        (4, 1)
    """
    index = request.index or 0
    if index and not there:
        raise CoresError(
            f"cores=[{index}] was requested, but without a TPU torch_tpu gives this process core 0. Pass cores=1"
        )
    if there and index >= there:
        raise CoresError(f"cores=[{index}] was requested, but this host's TPU has cores 0 to {there - 1}")
    if there and (request.count or 1) > there:
        raise CoresError(
            f"{request.count} cores were requested, but this host has {there} TPU cores. Pass cores='auto' to use all"
        )
    return request.count or max(there, 1)


def make_core_variables(index: int | None) -> dict[str, str]:
    """Return the variables by which libtpu takes only the chip of one core; none without an index.

    Raises:
        CoresError: A chip has several cores, but libtpu can only select chips.
    """
    if index is None:
        return {}
    if any(chip.devices > 1 for chip in hardware.find_chips()):
        raise CoresError(
            f"cores=[{index}] was requested, but a chip of this TPU has several cores, and libtpu can only select "
            "chips. Pass cores=1 for the first core"
        )
    return {"TPU_VISIBLE_CHIPS": str(index), "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}


def environments(host: Host, own: int, platform: str) -> list[dict[str, str]]:
    """Return the variables for the process of each of this host's cores. If there are several hosts, **this waits**.

    On several hosts, addresses and a topology that the user has set are kept.

    Args:
        host: This host. The hosts must be connected.
        own: The number of this host's cores, which is the same on all hosts.
        platform: The kind of device.

    Raises:
        RuntimeError: No group of so many cores can be made of this host's chips.
    """
    count = own * host.count
    at_once = own * host.local_count
    topology = names().topology(at_once) if platform == "TPU" else f"{count},1,1"
    if topology is None:
        raise RuntimeError("this process can't open any TPU chip below /dev/vfio")
    common = {
        _TOPOLOGY: str(topology),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(at_once),
        "MASTER_ADDR": host.address,
        "MASTER_PORT": str(host.port),
    }
    if host.count == 1:
        port, *ports = _free_ports(own + 1)
        common |= {"MASTER_PORT": str(port), _ADDRESSES: ",".join(f"localhost:{port}" for port in ports)}
    else:
        here = _own_address(host)
        everywhere = all_gather([f"{here}:{port}" for port in _free_ports(own)])
        common[_ADDRESSES] = ",".join(chain.from_iterable(everywhere))
        common |= {name: os.environ[name] for name in (_ADDRESSES, _TOPOLOGY) if name in os.environ}
    first, local_first = own * host.index, own * host.local_index
    return [{**common, "RANK": str(first + i), "LOCAL_RANK": str(local_first + i)} for i in range(own)]


@contextmanager
def setting_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """A context with other variables. If they stayed set, other libraries would expect a distributed run."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _own_address(host: Host) -> str:
    """Return the address by which all hosts reach this machine. **This waits** for all hosts."""
    address = _address_towards(host.address, host.port)
    elsewhere = other_machine(address, all_gather(address))
    return address if elsewhere is None else _address_towards(elsewhere, host.port)


def other_machine(address: str, addresses: Iterable[str]) -> str | None:
    """Return an address of another machine, if this machine's address is only valid on itself.

    Debian's `/etc/hosts` maps a machine's own name to a loopback address, so process 0's route to itself is loopback.

    Example:
        >>> other_machine("127.0.1.1", ["127.0.1.1", "10.0.0.2"])
        '10.0.0.2'
        >>> other_machine("127.0.1.1", ["127.0.1.1", "127.0.1.1"])  # all hosts are on this machine
        >>> other_machine("10.0.0.2", ["127.0.1.1", "10.0.0.2"])
    """
    if not ip_address(address).is_loopback:
        return None
    return next((one for one in addresses if not ip_address(one).is_loopback), None)


def _address_towards(address: str, port: int) -> str:
    """Return this machine's address on the route to another, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((address, port))
        return str(one.getsockname()[0])


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [int(one.getsockname()[1]) for one in sockets]
