#!/usr/bin/env python3
"""Run a command in a small virtual machine that has software RDMA devices. README.md tells more.

usage: run_in_guest.py [options] -- command ...

The exit status is the command's; 124 past the time limit, 125 if the guest broke off or could not be started.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import lzma
import mmap
import os
import platform
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = [
    "qemu-system-x86",
    "qemu-system-common",
    "busybox-static",
    "kmod",
    "iproute2",
    "ibverbs-providers",
    "ibverbs-utils",
    "perftest",
]
KERNEL = "linux-image-amd64"
VIRTIOFSD = "/usr/lib/qemu/virtiofsd"
FAILED, TIMED_OUT = 125, 124
FIRST_MODULES = ["virtio_pci", "virtio_console", "virtiofs", "overlay", "9p", "9pnet_virtio"]
BOOT = (
    "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nowatchdog tsc=reliable no_timer_check"
    " random.trust_cpu=on rcupdate.rcu_expedited=1"
)


class Failure(Exception):
    """Something that the guest needs is not there, or did not work; the text says what."""


def cannot() -> str:
    """Return why no guest can be had here without --install, or ""."""
    if os.geteuid() != 0:
        return "the guest shares this machine's root: it needs uid 0"
    tools = ["qemu-system-x86_64", "busybox", "modprobe", "rdma", "ip", "apt-get"]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing or not os.path.exists(VIRTIOFSD):
        return f"not installed: {' '.join(missing) or VIRTIOFSD}; run_in_guest.py --install -- true"
    return ""


def call(*command: str, cwd: str | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command and return what it said. Raises Failure with that text."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, env=env, check=False
        )
    except OSError as error:
        raise Failure(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise Failure(f"{shlex.join(command)}: {done.stdout[-2000:]}")
    return done.stdout


def install() -> None:
    """apt-get what is missing."""
    call("apt-get", "update", "-q")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    call("apt-get", "install", "-q", "-y", "--no-install-recommends", *PACKAGES, env=quiet)


# ---- the kernel ------------------------------------------------------------------------------------------------------


def unpacked(image: bytes) -> bytes:
    """Take the kernel out of a bzImage packed with xz: that takes an emulated machine longer than its boot."""
    at = image.find(b"\xfd7zXZ\0")
    return image if at < 0 else lzma.LZMADecompressor().decompress(image[at:])


def kernel(cache: Path) -> tuple[Path, str]:
    """Return (folder, version) of Debian's kernel, unpacked in the cache and never installed; fetched if need be."""
    folder = cache / KERNEL
    with open(cache / "lock", "w") as lock, tempfile.TemporaryDirectory(dir=cache) as work:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            depends = re.search(r"Depends: (linux-image-\S+)", call("apt-cache", "depends", KERNEL))
            package = depends[1] if depends else KERNEL
            call("apt-get", "-o", "APT::Sandbox::User=root", "download", package, cwd=work)
            (deb,) = Path(work).glob("*.deb")
            call("dpkg-deb", "-x", str(deb), f"{work}/tree")
            (version,) = os.listdir(f"{work}/tree/lib/modules")
            out = Path(work, "out")
            (out / "lib").mkdir(parents=True)
            os.rename(f"{work}/tree/lib/modules", out / "lib" / "modules")
            (out / "kernel").write_bytes(unpacked(Path(f"{work}/tree/boot/vmlinuz-{version}").read_bytes()))
            call("depmod", "-b", str(out), version)
            os.rename(out, folder)
    return folder, os.listdir(folder / "lib" / "modules")[0]


def module_files(folder: Path, version: str) -> dict[str, bytes]:
    """Return the modules that the first stage loads, in an order that works, as files of the initramfs."""
    order: list[str] = []
    files: dict[str, bytes] = {}
    said = call("modprobe", "-d", str(folder), "-S", version, "-a", "--show-depends", *FIRST_MODULES)
    for line in said.splitlines():
        kind, path, *_ = line.split()
        name = os.path.basename(path).removesuffix(".xz")
        if kind == "insmod" and name not in order:
            order.append(name)
            data = Path(path).read_bytes()
            files[f"modules/{name}"] = lzma.decompress(data) if path.endswith(".xz") else data
    files["modules/order"] = "".join(f"{name}\n" for name in order).encode()
    return files


def initramfs(path: Path, files: dict[str, bytes]) -> None:
    """Write a newc archive of these files (name to bytes), the folders above them and the console's device."""
    with open(path, "wb") as out:

        def put(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
            raw = name.encode() + b"\0"
            head = [0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(raw), 0]
            entry = b"070701" + b"".join(b"%08x" % number for number in head) + raw
            out.write(entry + b"\0" * (-len(entry) % 4) + data + b"\0" * (-len(data) % 4))

        for folder in ["dev", *sorted({os.path.dirname(name) for name in files} - {""})]:
            put(folder, 0o40755)
        put("dev/console", 0o20600, device=(5, 1))
        for name, data in files.items():
            put(name, 0o100755, data)
        put("TRAILER!!!", 0)


# ---- the machine -----------------------------------------------------------------------------------------------------


def counter_rate() -> int:
    """Return how many thousand times in a second this processor's time-stamp counter counts; 0: not to be had.

    The guest reads the same counter. Left to itself it measures the rate while it boots, against emulated timers: on a
    busy host it was wrong by a factor of 3, and with it the guest's clock and every deadline in there.
    """
    code = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
    try:
        with mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
            page.write(code)
            first = ctypes.c_char.from_buffer(page)
            read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(first))

            def point() -> tuple[int, int]:
                """The clock and the counter at one moment: of many tries the one that was least interrupted."""
                tries = []
                for _ in range(50):
                    begin, count, end = time.monotonic_ns(), read(), time.monotonic_ns()
                    tries.append((end - begin, (begin + end) // 2, count))
                return min(tries)[1:]

            begin, low = point()
            time.sleep(0.1)
            end, high = point()
            del first  # or the page could not be given back
    except (OSError, ValueError):  # no memory that may be executed
        return 0
    return (high - low) * 1_000_000 // (end - begin)


def job(command: Sequence[str]) -> bytes:
    """Return a script that becomes the command, with this process's environment and folder."""
    lines = [
        f"export {k}={shlex.quote(v)}" for k, v in os.environ.items() if k.isidentifier() and k not in ("_", "SHLVL")
    ]
    lines += [f"cd {shlex.quote(os.getcwd())} || exit 125", "exec " + shlex.join(command), ""]
    return os.fsencode("\n".join(lines))


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def qemu_line(args: argparse.Namespace, work: Path, folder: Path) -> list[str]:
    """Return QEMU's command line, save the ports that carry the output. Plain emulation: KVM is seldom to be had."""

    def comma(path: Path | str) -> str:
        return str(path).replace(",", ",,")

    line = ["qemu-system-x86_64", "-M", "pc", "-cpu", "max,la57=off"]
    line += (
        ["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off"]
        if args.icount
        else ["-accel", "tcg,thread=multi"]
    )
    line += ["-smp", str(args.cpus), "-m", f"{args.mem}M", "-nodefaults", "-no-user-config", "-display", "none"]
    line += ["-no-reboot", "-chardev", f"file,id=log,path={comma(work)}/console", "-serial", "chardev:log"]
    rate = 0 if args.icount or platform.machine() != "x86_64" else counter_rate()
    boot = f"{BOOT} tsc_early_khz={rate}" if rate else BOOT
    line += ["-kernel", str(folder / "kernel"), "-initrd", str(work / "initramfs"), "-append", boot]
    line += ["-object", f"memory-backend-memfd,id=mem,size={args.mem}M,share=on", "-numa", "node,memdev=mem"]
    line += [
        "-chardev",
        f"socket,id=root,path={comma(work)}/root",
        "-device",
        "vhost-user-fs-pci,chardev=root,tag=root",
    ]
    for number, path in enumerate(args.rw):
        device = f"local,id=rw{number},path={comma(os.path.realpath(path))},security_model=none,multidevs=remap"
        line += ["-fsdev", device, "-device", f"virtio-9p-pci,fsdev=rw{number},mount_tag=rw{number}"]
    return [*line, "-device", "virtio-serial-pci"]


def run(args: argparse.Namespace, folder: Path, version: str, work: Path, deadline: float) -> tuple[int, list[str]]:
    """Boot, run the command, and return its exit status and when each step was reached."""
    files = {"bin/busybox": Path("/bin/busybox").read_bytes(), "init": (HERE / "guest-init").read_bytes()}
    files["job/main"] = (HERE / "guest-main").read_bytes()
    files["job/net"] = (HERE / "guest-net").read_bytes()
    files.update(module_files(folder, version))
    conf = {"kernel": version, "modules": f"{folder}/lib/modules/{version}", "nics": args.nics}
    files["job/conf"] = "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in conf.items()).encode()
    files["job/rw"] = "".join(os.path.realpath(path) + "\n" for path in args.rw).encode()
    files["job/job"] = job(args.command)
    initramfs(work / "initramfs", files)

    line = qemu_line(args, work, folder)
    pipes = {name: os.pipe() for name in ("control", "stdout", "stderr")}
    for name, (_, write) in pipes.items():
        line += ["-chardev", f"file,id={name},path=/proc/self/fd/{write},append=on"]
        line += ["-device", f"virtserialport,chardev={name},name={name}"]
    children: list[subprocess.Popen[bytes]] = []
    try:
        with open(work / "log", "wb") as log:

            def start(command: list[str], keep: Sequence[int] = ()) -> subprocess.Popen[bytes]:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=die_with_parent,  # noqa: PLW1509  (this program has no threads)
                    pass_fds=keep,
                )
                children.append(child)
                return child

            share = "source=/,cache=always,sandbox=chroot,log_level=err"
            server = start([VIRTIOFSD, f"--socket-path={work}/root", "-o", share])
            while not (work / "root").exists() and server.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            machine = start(line, [write for _, write in pipes.values()])
        for _, write in pipes.values():
            os.close(write)
        return follow(machine, {name: read for name, (read, _) in pipes.items()}, deadline)
    finally:
        for child in children:
            child.kill()
            child.wait()


def follow(machine: subprocess.Popen[bytes], ends: dict[str, int], deadline: float) -> tuple[int, list[str]]:
    """Pass the output on until the machine is gone."""
    status: int | None = None
    rest, steps, started = b"", [], time.monotonic()
    sinks = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    with selectors.DefaultSelector() as selector:
        for name, fd in ends.items():
            selector.register(fd, selectors.EVENT_READ, name)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0 and status is None:
                status = TIMED_OUT
                machine.kill()
            for key, _ in selector.select(max(left, 0.1)):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fd)
                elif key.data != "control":
                    sinks[key.data].write(data)
                    sinks[key.data].flush()
                else:
                    *lines, rest = (rest + data).split(b"\n")
                    for what, value, *when in (line.decode().split() for line in lines):
                        if what == "at":
                            steps.append(f"{value} {time.monotonic() - started:.1f} (guest's clock {when[0]})")
                        elif status is None:
                            status = int(value)
                            machine.kill()
    return (FAILED if status is None else status), steps


def parse() -> argparse.Namespace:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    parser = argparse.ArgumentParser(
        description="Run a command in a small virtual machine with software RDMA devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--cache", default=f"{home}/fabric-rdma-guest", help="where the kernel is kept (460 MB)")
    parser.add_argument("--install", action="store_true", help="apt-get install what is missing, then go on")
    parser.add_argument("--timeout", type=float, default=300, help="seconds from the start to the command's end")
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument(
        "--icount", action="store_true", help="the guest's clock counts instructions, 1 ns each; one processor"
    )
    parser.add_argument("--mem", type=int, default=3072, help="MiB")
    parser.add_argument("--nics", type=int, default=2, help="RDMA devices")
    parser.add_argument("--rw", action="append", default=[], metavar="DIR", help="a folder where what is written stays")
    parser.add_argument("--stats", action="store_true", help="say on standard error how long it all took")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="without one, only prepare the cache")
    args = parser.parse_args()
    args.command = args.command[args.command[:1] == ["--"] :]
    if args.icount:
        args.cpus = 1
    return args


def main() -> int:
    args = parse()
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if args.install and cannot():
            install()
        if reason := cannot():
            raise Failure(reason)
        cache = Path(args.cache).expanduser().resolve()
        cache.mkdir(parents=True, exist_ok=True)
        folder, version = kernel(cache)
        if not args.command:
            return 0
        with tempfile.TemporaryDirectory(prefix="run-", dir=cache) as work:
            ready = time.monotonic()
            status, steps = run(args, folder, version, Path(work), begin + args.timeout)
            if status in (FAILED, TIMED_OUT):
                what = "guest broke off" if status == FAILED else "time limit was reached"
                print(f"run_in_guest: the {what}; steps: {steps}; its last words:", file=sys.stderr)
                for name in ("console", "log"):
                    print(Path(work, name).read_text(errors="replace")[-3000:], file=sys.stderr)
    except (Failure, OSError) as error:
        print(f"run_in_guest: {error}", file=sys.stderr)
        return FAILED
    if args.stats:
        print(
            f"run_in_guest: {version}: ready after {ready - begin:.1f} s; then {', '.join(steps)};"
            f" all in all {time.monotonic() - begin:.1f} s",
            file=sys.stderr,
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
