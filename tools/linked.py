"""`treadle` for a run whose own servers are called at other addresses than they listen at.

usage: python tools/linked.py '{"redis": ADDRESS, "nats": ADDRESS}' COMMAND ...

Services are told these addresses; who starts the servers, and asks whether they answer, goes on
with their own.
"""

import json
import sys
from collections.abc import Mapping

from treadle_cli.main import main
from treadle_runtime.local_servers.known import KINDS


def lead(addresses: Mapping[str, str]) -> None:
    """Has this process tell clients these addresses, by the servers' names."""
    for name, address in addresses.items():
        # A test's own business, so that no server needs a setting for it.
        setattr(KINDS[name], "address", property(lambda _, said=address: said))  # noqa: B010


if __name__ == "__main__":
    lead(json.loads(sys.argv[1]))
    main(sys.argv[2:])
