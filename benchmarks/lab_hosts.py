"""The kernel's side of the lab: what this machine must offer, namespaces that end with their owner, commands inside them.

    owner -- pipe, PDEATHSIG --> unshare -- kill-child --> process 1 of host0 (waits for the pipe to close)
      `---- nsenter ----------------------------------->   command of rank 0
"""

import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence

MTU = 1500  # bytes


class LabError(RuntimeError):
    """The lab cannot run here, or what it measured cannot be trusted. The message names the reason and the remedy."""


# shaping ------------------------------------------------------------------------------------------------------------------


class Shaping(NamedTuple):
    """How a network card is slowed down. All in bytes."""
    granule: int  # largest packet that the stack hands to the card (gso/gro size)
    burst: int  # what an idle card sends at once
    queue: int  # what waits for the card
    unsent: int  # what one connection may have in that queue (tcp_limit_output_bytes)


def shaping(rate_mbit: float, granule_ms: float = 0.4) -> Shaping:
    """The settings with which a card of ``rate_mbit`` Mbit/s behaves like a real one.

    Large granules cost less CPU, small ones share the line more finely: 0.4 ms of line rate is the compromise, and more where
    everything runs in slow motion. The bucket holds
    one granule, because with more a short message would pass for free. The queue never drops, so that runs can be repeated.
    Without a limit on what a connection has in the queue (the kernel's default is megabytes), every small message would wait
    behind a whole bulk transfer.
    """
    bytes_per_s = rate_mbit * 1e6 / 8
    granule = int(min(65536, max(4096, bytes_per_s * granule_ms / 1000)))
    return Shaping(granule, granule + 2 * MTU, int(max(4e6, bytes_per_s * 50e-3)), max(8192, 2 * granule))


# can it run here ----------------------------------------------------------------------------------------------------------

_PROBES = {  # what a lab is made of, in a namespace that goes away again -> what is missing where the command fails
    "mount -t tmpfs tmpfs /dev/shm": "the right to mount in a namespace (in a container: start it with --privileged)",
    "ip link add name probe0 type veth peer name probe1": "veth devices in the kernel (modprobe veth)",
    "ip link add name probe2 type bridge": "bridge devices in the kernel (modprobe bridge)",
    "tc qdisc replace dev probe0 root tbf rate 1mbit burst 4kb limit 64kb": "the tbf queue in the kernel (modprobe sch_tbf)",
}
_NAMESPACES = ["-n", "-m", "-u", "-i", "-p", "-f", "--mount-proc", "--kill-child"]


def missing() -> List[str]:
    """What the lab needs and this machine lacks, each with its remedy. Takes about 30 ms."""
    lacks = []
    for package, tools in (("iproute2", ("ip", "tc")), ("util-linux", ("unshare", "nsenter", "setpriv"))):
        absent = [tool for tool in tools if shutil.which(tool) is None]
        if absent:
            lacks.append(f"the commands {', '.join(absent)} (install {package})")
    if os.geteuid() != 0:
        lacks.append("root (run it with sudo)")
    if not lacks:
        script = "\necho up\n".join(["", *_PROBES, ""])
        done = subprocess.run(["unshare", *_NAMESPACES, "sh", "-ec", script], capture_output=True, text=True)
        steps = done.stdout.count("up\n")
        needs = ["the right to make namespaces (in a container: start it with --privileged)", *_PROBES.values()]
        lacks += [f"{need}: {done.stderr.strip()}" for need in needs[steps:steps + 1]]
    return lacks


def require() -> None:
    """Raise a LabError that names everything :func:`missing`."""
    lacks = missing()
    if lacks:
        raise LabError(f"the network lab cannot run here. Missing: {'; '.join(lacks)}")


# namespaces ---------------------------------------------------------------------------------------------------------------

_INIT = """
mount -t tmpfs tmpfs /dev/shm
hostname "$1"
mount --bind "$2" /etc/hosts
ip link set lo up
for setting in "$@"; do
    case $setting in net/*=*) ! test -e "/proc/sys/${setting%=*}" || echo "${setting#*=}" > "/proc/sys/${setting%=*}";; esac
done
echo up
# process 1 of the host, until the lab closes the pipe or dies; with that signal ignored, the kernel reaps what nobody waits for
exec env --ignore-signal=CHLD cat
"""


class Namespaces:
    """The namespaces of one host or of the switch. They have no name, so they are gone with their last process, and that process
    ends with its owner, however the owner ends: its pipe closes, and it gets SIGKILL."""

    def __init__(self, name: str, hosts_file: Path, settings: Sequence[str] = ()):
        # the kernel means the thread, not the process, that is the parent: a lab made in a thread relies on the pipe alone
        main_thread = threading.current_thread() is threading.main_thread()
        guard = ["setpriv", "--pdeathsig", "KILL"] if main_thread else []
        self.name = name
        command = [*guard, "unshare", *_NAMESPACES, "sh", "-ec", _INIT, "lab", name, str(hosts_file), *settings]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        start_new_session=True)
        self.pid = self.process.pid

    def wait_up(self) -> None:
        lines = []
        for line in self.process.stdout:
            if line == "up\n":
                return
            lines.append(line)
        raise LabError(f"{self.name} did not start: {''.join(lines).strip()}")

    def enter(self, *command: str) -> List[str]:
        """The command line that runs ``command`` in here, in this process's working directory."""
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "-i", f"--pid=/proc/{self.pid}/ns/pid_for_children",
                f"--wd={os.getcwd()}", "--", *command]

    def network(self, script: str) -> str:
        """Run a shell script with the network of here and the rest of the machine; returns what it prints."""
        done = subprocess.run(["nsenter", "-t", str(self.pid), "-n", "sh", "-ec", script], capture_output=True, text=True)
        if done.returncode:
            raise LabError(f"{self.name}: {done.stderr.strip() or f'exit code {done.returncode}'} in\n{script}")
        return done.stdout

    def end(self) -> None:
        """End every process in here and wait until they are gone."""
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Task:
    """One command that runs on a host, its output in a file."""

    def __init__(self, name: str, command: Sequence[str], env: Dict[str, str], log: Path):
        self.name, self.log, self.cpu_s, self._shown = name, log, 0.0, 0
        with open(log, "wb") as file:
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                            start_new_session=True)

    def ended(self) -> bool:
        """Whether it ended; then its exit code and its CPU time are known."""
        if self.process.returncode is None:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.process.returncode = os.waitstatus_to_exitcode(status)
                self.cpu_s = usage.ru_utime + usage.ru_stime
        return self.process.returncode is not None

    def show(self) -> None:
        """Print the lines that are new."""
        with open(self.log, "rb") as file:
            file.seek(self._shown)
            new = file.read()
        if self.process.returncode is None:
            new = new[:new.rfind(b"\n") + 1]  # the rest of the line comes later
        self._shown += len(new)
        for line in new.decode(errors="replace").splitlines():
            print(f"[{self.name}] {line}", flush=True)
