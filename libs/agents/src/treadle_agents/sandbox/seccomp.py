"""System calls that no command in a box may make: a filter for the kernel, as bytes.

They reach memory that no limit counts, other processes, or parts of the kernel that ordinary
programs do not need.
"""

import struct
from collections.abc import Mapping
from types import MappingProxyType

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # of classic BPF
_NUMBER_AT, _MACHINE_AT = 0, 4  # in struct seccomp_data
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050001  # refused with EPERM
_X32 = 0x40000000
"""Numbers of a second interface of x86-64 begin here."""

_ANYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
"""io_uring_*, open_tree, move_mount, fs*, pidfd_getfd, mount_setattr, memfd_secret."""

MACHINES: Mapping[str, tuple[int, tuple[int, ...]]] = MappingProxyType(
    {
        # memfd_create shmget userfaultfd bpf perf_event_open | add_key request_key keyctl | ptrace
        # process_vm_readv process_vm_writev | mount umount2 pivot_root unshare setns | init_module
        # finit_module delete_module kexec_load kexec_file_load | name_to_handle_at
        # open_by_handle_at | swapon reboot quotactl acct syslog vmsplice
        "x86_64": (
            0xC000003E,
            (
                *(319, 29, 323, 321, 298, 248, 249, 250, 101, 310, 311, 165, 166, 155, 272, 308),
                *(175, 313, 176, 246, 320, 303, 304, 167, 169, 179, 163, 103, 278),
            ),
        ),
        "aarch64": (
            0xC00000B7,
            (
                *(279, 194, 282, 280, 241, 217, 218, 219, 117, 270, 271, 40, 39, 41, 97, 268),
                *(105, 273, 106, 104, 294, 264, 265, 224, 142, 60, 89, 116, 75),
            ),
        ),
    }
)
"""By name of the machine: how the kernel calls it, and the numbers of the calls."""


def program(machine: str) -> bytes:
    """The filter for `machine`; raises KeyError where it is not in MACHINES."""
    audit, calls = MACHINES[machine]
    refused = sorted({*calls, *_ANYWHERE})
    code = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, len(refused) + 1, 0, _X32),
        # A jump counts the instructions that it leaves out: of those left, one is the allowance.
        *((_EQUAL, len(refused) - index, 0, call) for index, call in enumerate(refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("=HBBI", *each) for each in code)
