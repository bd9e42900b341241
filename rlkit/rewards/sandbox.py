"""Runs one program under limits, on Linux: a script of the standard library alone.

``programs.py`` starts it. Three processes: this one; the ``init``, which starts the program and
ends all that it started; the program. Where the kernel allows it, init is the first process of
namespaces of its own: the program then sees no other process and no network, and every folder but
its own is read-only.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import stat
import sys
import time
import traceback
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_CAPBSET_READ = 1, 8, 23
PR_SET_CHILD_SUBREAPER, PR_CAP_AMBIENT = 36, 47
CAPABILITY_VERSION_3, READ_ALL = 0x20080522, 2  # CAP_DAC_READ_SEARCH
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NET = 0x20000, 0x8000000, 1 << 28, 1 << 29, 1 << 30
NOSUID, NODEV, NOEXEC, RECURSIVE, PRIVATE = 2, 4, 8, 0x4000, 0x40000  # of mount
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1  # a call of Linux 5.12
KILL_S = 5.0  # to end what a program has started
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def main(job: dict[str, Any]) -> None:
    """Run the job's program; what became of it goes to stdout as JSON, written by init."""
    # If nobody waits any more, one of two signals ends this process, and that the others.
    signal.setitimer(signal.ITIMER_REAL, job["timeout_s"] + 2 * KILL_S)
    job["reads_all"] = not python_is_for_all()
    if not can_switch_user(job["reads_all"]):
        job["user"] = None
    isolated = isolate(job)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    init = os.fork()
    if init == 0:
        try:
            become_init(job, isolated)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(init, 0)
    end_children()


def python_is_for_all() -> bool:
    """Whether another user could start this Python."""
    places = [os.path.realpath(place) for place in (sys.executable, os.__file__, sys.prefix)]
    folders = {str(folder) for place in places for folder in Path(place).parents}
    return all(os.stat(folder).st_mode & stat.S_IXOTH for folder in folders)


def can_switch_user(reads_all: bool) -> bool:
    """Whether this process can become another user, one who may read all files if need be."""
    if os.getuid() != 0:
        return False
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    many_users = sum(int(line.split()[2]) for line in lines) >= 65_536  # not a container's root
    return many_users and (not reads_all or LIBC.prctl(PR_CAPBSET_READ, READ_ALL) == 1)


def isolate(job: dict[str, Any]) -> bool:
    """Give the children of this process namespaces of their own; False if that is refused."""
    flags = NEW_MOUNTS | NEW_IPC | NEW_PIDS | NEW_NET
    if job["user"] is not None:
        return LIBC.unshare(flags) == 0
    uid, gid = os.getuid(), os.getgid()
    if LIBC.unshare(flags | NEW_USER) != 0:
        return False
    maps = {"setgroups": "deny", "uid_map": f"1000 {uid} 1", "gid_map": f"1000 {gid} 1"}
    for name, text in maps.items():
        Path(f"/proc/self/{name}").write_text(text)
    return True


def become_init(job: dict[str, Any], isolated: bool) -> None:
    """Start the program, wait for it, report, end what it left running."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    main_py = Path(job["folder"], "main.py")
    source = main_py.read_bytes()
    if isolated:
        own_mounts(job)
        main_py.write_bytes(source)
    elif job["hide"]:
        raise OSError(f"hide: got {job['hide']}, need mount namespaces, which are refused here.")
    main_py.chmod(0o444)
    if job["user"] is not None:
        os.chown(job["folder"], job["user"], job["user"])
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    errors = os.dup(2)
    program = os.fork()
    if program == 0:
        try:
            become_program(job)
        except BaseException:
            os.write(errors, traceback.format_exc().encode())
        finally:
            os._exit(1)
    exit_code = wait_for(program, job["timeout_s"])
    print(json.dumps({"exit_code": exit_code}), flush=True)
    if not isolated:  # else all end with init
        end_children()


def own_mounts(job: dict[str, Any]) -> None:
    """All read-only but the program's folder, which is a memory disk; hidden folders empty."""
    mount(None, "/", RECURSIVE | PRIVATE)
    with contextlib.suppress(OSError):  # refused where parts of the old one are masked
        mount("proc", "/proc", NOSUID | NODEV | NOEXEC)
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY)
    LIBC.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.c_size_t(32))
    for folder in job["hide"]:
        mount("tmpfs", folder, NOSUID | NODEV, "size=4k,mode=555")
    mount("tmpfs", job["folder"], NOSUID | NODEV, f"size={8 * job['file_bytes']},mode=1777")


def mount(kind: str | None, place: str, flags: int, options: str = "") -> None:
    """mount(2); an OSError names the place."""
    name = None if kind is None else kind.encode()
    if LIBC.mount(name, place.encode(), name, ctypes.c_ulong(flags), options.encode()) != 0:
        raise OSError(f"mount {place}: {os.strerror(ctypes.get_errno())}")


def become_program(job: dict[str, Any]) -> None:
    """Give up rights, take limits, and turn into the program."""
    os.setsid()  # so that kill(0) reaches it and what it starts
    for place, fd in enumerate(job["fds"]):
        os.dup2(fd, place)
    if job["user"] is not None:
        switch_user(job["user"], job["reads_all"])
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    limits = {
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_FSIZE: job["file_bytes"],
        resource.RLIMIT_NPROC: job["num_processes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    limits[resource.RLIMIT_CPU] = job["cpu_s"] + 1  # SIGKILL, and SIGXCPU one second earlier
    for what, limit in limits.items():
        hard = resource.getrlimit(what)[1]  # may be lowered, not raised
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        soft = limit - 1 if what == resource.RLIMIT_CPU else limit
        resource.setrlimit(what, (soft, limit))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.chdir(job["folder"])
    places = {"HOME": job["folder"], "TMPDIR": job["folder"]}
    command = [sys.executable, "-I", "-B", "-X", "utf8", "main.py"]
    os.execve(sys.executable, command, ENVIRONMENT | places)


def switch_user(user: int, reads_all: bool) -> None:
    """Become a user of no other process, so that the limit on processes counts this program's.

    The kernel holds no process of root to that limit. ``reads_all``: keep the right to read what
    root may read, which a Python in root's own folder needs.
    """
    os.setgroups([])
    os.setgid(user)
    LIBC.prctl(PR_SET_KEEPCAPS, reads_all)
    os.setuid(user)
    if reads_all:
        right = 1 << READ_ALL
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        rights = (ctypes.c_uint32 * 6)(right, right, right)  # effective, permitted, inheritable
        if LIBC.capset(header, rights) or LIBC.prctl(PR_CAP_AMBIENT, 2, READ_ALL, 0, 0):
            raise OSError(f"capset: {os.strerror(ctypes.get_errno())}")


def wait_for(program: int, timeout_s: float) -> int | None:
    """Exit code of the program, minus the signal that ended it; None if it ran past its time."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == program:
            return os.waitstatus_to_exitcode(status)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        if pid == 0:
            signal.sigtimedwait([signal.SIGCHLD], left_s)


def end_children() -> None:
    """Kill the children of this process, which orphans become, until there are none."""
    deadline_s = time.monotonic() + KILL_S
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while time.monotonic() < deadline_s:
        if children.exists():
            for pid in children.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.002)
        except ChildProcessError:
            return


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
