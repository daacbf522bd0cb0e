"""As much of bubblewrap as the sandbox needs, over unshare(2), for hosts without `bwrap`: its options, its effect.

Run as a program, with the standard library only: `python code_namespaces.py OPTIONS -- COMMAND...`. The command becomes
process 1 of new process, network, mount, IPC and host name namespaces (and a user namespace unless root starts it), in
a file system that holds nothing but what the options put there, and ends with the process that started this one.
"""

import ctypes
import os
import platform
import signal
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER, NEW_OTHERS = 0x10000000, 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
BIND, RECURSIVE, PRIVATE, NOSUID, NODEV = 4096, 16384, 1 << 18, 2, 4
ATTR_READ_ONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
PARENT_DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38
MOUNT_SETATTR, PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
HERE, DETACH, AT_RECURSIVE = -100, 2, 0x8000
ROOT = "/tmp"  # covered by the new root until that becomes /


def done(result, what):
    """Stop with the kernel's reason if a call failed."""
    if result != 0:
        sys.exit(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source, target, kind=None, flags=0, data=None):
    """mount(2)."""
    words = [word.encode() if word else None for word in (source, target, kind, data)]
    done(LIBC.mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mounting {target}")


def set_attributes(target, attributes, flags=0):
    """mount_setattr(2), Linux 5.12."""
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    done(LIBC.syscall(MOUNT_SETATTR, HERE, target.encode(), flags, wanted, 32), f"protecting {target}")


def enter():
    """Unshare everything; as an ordinary user by way of a user namespace in which the user stays who he is."""
    uid, gid = os.getuid(), os.getgid()
    done(LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL), "prctl")
    done(LIBC.unshare(NEW_OTHERS | (NEW_USER if uid else 0)), "unshare")
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def build(options):
    """Make the new root from bubblewrap's options, in their order, and move into it."""
    words = iter(options)
    steps = [(word, *(next(words) for _ in range(2 if word.endswith("bind") else 1))) for word in words]
    held = {step[1]: os.open(step[1], os.O_PATH) for step in steps if step[0].endswith("bind")}
    sources = {path: f"/proc/self/fd/{descriptor}" for path, descriptor in held.items()}  # ROOT may cover the paths
    mount(None, "/", None, RECURSIVE | PRIVATE)
    mount("tmpfs", ROOT, "tmpfs", NOSUID | NODEV, "mode=755")
    os.umask(0o022)
    modes = {}
    for option, *values in steps:
        target = ROOT + values[-1]
        if option in ("--size", "--perms"):
            modes[{"--size": "size", "--perms": "mode"}[option]] = values[0]
        elif option == "--dir":
            os.makedirs(target, exist_ok=True)
        elif option == "--tmpfs":
            os.makedirs(target)
            mount("tmpfs", target, "tmpfs", NOSUID | NODEV, ",".join(f"{key}={value}" for key, value in modes.items()))
        elif option.endswith("bind"):
            make_like(sources[values[0]], target)
            mount(sources[values[0]], target, None, BIND | RECURSIVE)
            read_only = option == "--ro-bind"
            set_attributes(target, ATTR_NOSUID | (ATTR_READ_ONLY | ATTR_NODEV) * read_only, AT_RECURSIVE)
        elif option == "--remount-ro":
            set_attributes(target.rstrip("/"), ATTR_READ_ONLY)
        elif option == "--chdir":
            pivot()
            os.chdir(values[0])
        else:
            sys.exit(f"unknown option {option}")
    for descriptor in held.values():
        os.close(descriptor)


def make_like(source, target):
    """Make what a bind mount goes on: a directory, or an empty file."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.close(os.open(target, os.O_CREAT, 0o644))


def pivot():
    """Make the new root / and let go of the old one."""
    os.chdir(ROOT)
    done(LIBC.syscall(PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    done(LIBC.umount2(b".", DETACH), "leaving the old root")


def main(words):
    """Fork the command into the new namespaces and exit as it does."""
    split = words.index("--")
    options, command = words[:split], words[split + 1 :]
    if platform.machine() not in PIVOT_ROOT:
        sys.exit(f"{platform.machine()} processors need bubblewrap.")
    enter()
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)
    done(LIBC.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL), "prctl")
    build(options)
    done(LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
