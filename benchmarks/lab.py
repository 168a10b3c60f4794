"""The network lab: a cluster of hosts with slow networks, emulated on one machine by the kernel's own means.

    host0            host1            host2        each with network, mount, hostname, IPC and process namespaces of its own:
    rank 0           rank 1           rank 2       no shared memory between hosts, no route that leaves the lab
     eth0             eth0             eth0        uplink:   tbf at the rate of the network
      |                |                |
    port 0 ------- the switch ------- port 2       downlink: tbf at the same rate (full duplex)

    python benchmarks/lab.py run --hosts 4 --rate 200 -- python train.py          one command per rank
    python benchmarks/lab.py check --hosts 4 --rate 200                           does the network behave as it should?
    python benchmarks/lab.py clean                                                remove what killed labs left behind

    with Lab(hosts=4, rate_mbit=200) as lab:
        result = lab.run(["python", "train.py"])

Ranks speak real TCP through real queues; only the cables are made up. What it does not emulate: added latency (a message takes
what wake-ups on this machine take), loss, jitter, an oversubscribed switch, and processors: all hosts share this machine's, so a
result counts only where the processors mostly idle (``Result.flags``).
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from lab_cpu import CpuUse, cpu_ticks, cpu_use, distrust, timed, timed_use
from lab_hosts import MTU, LabError, Namespaces, Shaping, Task, missing, require, shaping

__all__ = ["CpuUse", "Lab", "LabError", "Result", "Shaping", "clean", "distrust", "missing", "require", "shaping", "timed"]

FIRST_PORT = 29500
# reno: some other algorithms probe the line now and then and hold single messages up for tens of ms. No slow start after idle,
# because a pipeline is idle all the time. No metrics of earlier connections, so that runs do not depend on each other
TCP_SETTINGS = ("net/ipv6/conf/all/disable_ipv6=1", "net/ipv6/conf/default/disable_ipv6=1",
                "net/ipv4/tcp_congestion_control=reno", "net/ipv4/tcp_slow_start_after_idle=0", "net/ipv4/tcp_no_metrics_save=1")
_MARK = "ds_fold-lab-"  # first part of the name of a lab's directory


@dataclass(frozen=True)
class Result:
    """What became of one :meth:`Lab.run`. Lists by rank are lists by host where one command ran per host."""
    status: str  # "ok", "failed" or "timeout"
    exit_codes: List[int]  # by rank; negative: ended by that signal
    first_failure: Optional[int]  # the rank that failed first
    outputs: List[str]  # by rank, stdout and stderr together
    wall_s: float
    cpu: CpuUse  # of the timed parts where ranks use timed(), else of the whole run
    rank_cpu_s: List[float]  # by rank, over the whole run
    drops: int  # packets, in all queues
    sent_bytes: List[int]  # by host, over the network card
    flags: List[str]  # why the timing is not to be trusted

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def __str__(self) -> str:
        sent = ", ".join(f"{count / 1e6:.1f}" for count in self.sent_bytes)
        first = "" if self.first_failure is None else f" (rank {self.first_failure} first)"
        return (f"{self.status}{first} after {self.wall_s:.1f} s, exit codes {self.exit_codes}; CPU: {self.cpu}; "
                f"drops {self.drops}; MB sent by host: {sent}" + "".join(f"\nnot to be trusted: {flag}" for flag in self.flags))


class Lab:
    """A cluster with a slow network on this machine; a context manager. Several labs can exist at once; one lab runs one command
    at a time.

    Args:
        hosts: how many, 1 to 250.
        rate_mbit: Mbit/s of every host's network card in each direction. 100 to 200 on two cores; more needs more cores.
        latency_class: only "base", which is what the machine itself takes: about 0.05 to 0.15 ms one way for a message of
            4 bytes. The kernel would need netem to delay packets further, which many kernels lack; the lab does not pretend.
        granule_ms: ms of line rate that a card sends in one piece (:func:`shaping`).

    Raises:
        LabError: an argument is out of range, or on entering, the machine lacks something (:func:`require`).
    """

    def __init__(self, hosts: int, rate_mbit: float, latency_class: str = "base", granule_ms: float = 0.4):
        if latency_class != "base":
            raise LabError(f"latency class {latency_class!r} cannot be emulated: delaying packets takes the kernel's netem queue, "
                           f"which the lab does without because many kernels lack it. Use 'base', what the machine itself takes")
        if not 1 <= hosts <= 250:
            raise LabError(f"hosts={hosts} must be between 1 and 250")
        if not 1 <= rate_mbit <= 100000:
            raise LabError(f"rate_mbit={rate_mbit} must be between 1 and 100000 Mbit/s")
        self.hosts, self.rate_mbit, self.shaping = hosts, rate_mbit, shaping(rate_mbit, granule_ms)
        self.names = [f"host{host}" for host in range(hosts)]
        self._switch: Optional[Namespaces] = None
        self._hosts: List[Namespaces] = []
        self._dir: Optional[Path] = None
        self._runs = 0
        self._handlers: Dict[int, object] = {}

    # life ---------------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Lab":
        if self._dir:
            raise LabError("the lab is up already")
        require()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):  # so that they end the with block in order
                if signal.getsignal(number) == signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, lambda number, _: sys.exit(128 + number))
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._dir = Path(tempfile.mkdtemp(prefix=f"{_MARK}{os.getpid()}-{_start_time(os.getpid())}-"))
        hosts_file = self._dir / "hosts"
        hosts_file.write_text("127.0.0.1 localhost\n" + "".join(f"10.99.0.{i + 1} {name}\n" for i, name in enumerate(self.names)))
        settings = [*TCP_SETTINGS, f"net/ipv4/tcp_limit_output_bytes={self.shaping.unsent}"]
        self._switch = Namespaces("switch", hosts_file)
        for name in self.names:
            self._hosts.append(Namespaces(name, hosts_file, settings))
        everything = [self._switch, *self._hosts]
        (self._dir / "processes").write_text("".join(f"{each.pid} {_start_time(each.pid)}\n" for each in everything))
        for each in everything:
            each.wait_up()
        sizes = f"gso_max_size {self.shaping.granule} gro_max_size {self.shaping.granule}"
        shape = f"root tbf rate {int(self.rate_mbit * 1e6)}bit burst {self.shaping.burst}b limit {self.shaping.queue}b"
        self._switch.network("ip link add br0 type bridge stp_state 0 mcast_snooping 0 && ip link set br0 up\n" + "".join(
            f"ip link add p{i} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {host.pid}\n"
            f"ip link set p{i} {sizes} master br0 up\n"
            f"tc qdisc replace dev p{i} {shape}\n" for i, host in enumerate(self._hosts)))
        for i, host in enumerate(self._hosts):
            host.network(f"ip addr add 10.99.0.{i + 1}/24 dev eth0\nip link set eth0 {sizes} up\ntc qdisc replace dev eth0 {shape}")

    def close(self) -> None:
        """End everything that runs in the lab and remove it. Harmless when repeated."""
        for each in [*self._hosts, *([self._switch] if self._switch else [])]:
            each.end()
        self._hosts, self._switch = [], None
        if self._dir:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir = None
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    # running ------------------------------------------------------------------------------------------------------------------

    def run(self, command: Sequence[str], ranks_per_host: int = 1, *, per_host: bool = False, timeout: float = 600.0,
            env: Optional[Dict[str, str]] = None, nice: int = -10, grace: float = 3.0, echo: bool = False) -> Result:
        """Run ``command`` once per rank and wait for all; nothing of it is left on the hosts afterwards.

        In the command, {rank}, {host} (a number), {port} and {hostfile} are replaced. Ranks find the usual variables: RANK,
        WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, NODE_RANK, NNODES, GLOO_SOCKET_IFNAME.

        Args:
            ranks_per_host: ranks on the same host talk to each other without the network card.
            per_host: once per host instead, for launchers, without the variables that a launcher sets for its ranks;
                ``ranks_per_host`` is then what the hostfile says.
            timeout: s, after which everything is ended.
            env: variables added to this process's.
            nice: of the ranks. A negative one keeps their wake-ups prompt while the machine does something else.
            grace: s that the other ranks have to end by themselves when one has failed.
            echo: print what the ranks print, as it comes, with the rank before each line.

        Raises:
            LabError: the lab is not up.
        """
        if not self._dir:
            raise LabError("the lab is not up: use it in a with statement")
        self._runs += 1
        folder = self._dir / f"run{self._runs}"
        folder.mkdir()
        (folder / "hostfile").write_text("".join(f"{name} slots={ranks_per_host}\n" for name in self.names))
        tasks: List[Task] = []
        drops, sent, ticks, start = self.drops(), self.sent_bytes(), cpu_ticks(), time.monotonic()
        try:
            for rank in range(self.hosts * (1 if per_host else ranks_per_host)):
                line, variables = self._rank(rank, ranks_per_host, per_host, command, folder)
                tasks.append(Task(str(rank), ["nice", "-n", str(nice), *line], {**variables, **(env or {})},
                                  folder / f"rank{rank}.log"))
            status, first_failure = self._wait(tasks, timeout, grace, echo)
        finally:
            self._end(tasks)
        wall_s, ticks = time.monotonic() - start, [b - a for a, b in zip(ticks, cpu_ticks())]
        if echo:
            for task in tasks:
                task.show()
        cpu = timed_use(folder) or cpu_use(ticks, sum(task.cpu_s for task in tasks))
        drops = self.drops() - drops
        return Result(status, [task.process.returncode for task in tasks], first_failure,
                      [task.log.read_text(errors="replace") for task in tasks], wall_s, cpu, [task.cpu_s for task in tasks], drops,
                      [b - a for a, b in zip(sent, self.sent_bytes())], distrust(cpu, drops))

    def _rank(self, rank: int, ranks_per_host: int, per_host: bool, command: Sequence[str],
              folder: Path) -> Tuple[List[str], Dict[str, str]]:
        """The command line and the environment of one rank, or of one host's launcher."""
        host, local = (rank, 0) if per_host else divmod(rank, ranks_per_host)
        port = str(FIRST_PORT + self._runs)  # another one for every run: connections of the last one may still be closing
        # LOCAL_SIZE stays unset: where it is the world's size, DeepSpeed's shared-memory op waits for ranks of other hosts
        launcher_sets = {"RANK": rank, "WORLD_SIZE": self.hosts * ranks_per_host, "LOCAL_RANK": local,
                         "LOCAL_WORLD_SIZE": ranks_per_host, "LOCAL_SIZE": None}
        env = {name: value for name, value in os.environ.items() if name not in launcher_sets}
        env.update(MASTER_ADDR=self.names[0], MASTER_PORT=port, NODE_RANK=str(host), NNODES=str(self.hosts),
                   GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1", LAB_RUN_DIR=str(folder))
        if not per_host:
            env.update((name, str(value)) for name, value in launcher_sets.items() if value is not None)
        words = {"{rank}": str(rank), "{host}": str(host), "{port}": port, "{hostfile}": str(folder / "hostfile")}
        line = list(command)
        for word, value in words.items():
            line = [part.replace(word, value) for part in line]
        return self._hosts[host].enter(*line), env

    def launch_deepspeed(self, script: str, args: Sequence[str] = (), slots: int = 1, **options) -> Result:
        """One real launch over all hosts by DeepSpeed's launcher: `deepspeed --no_ssh --node_rank ...` on every host, with
        ``slots`` ranks each. ``options`` are those of :meth:`run`.

        Raises:
            LabError: there is no `deepspeed` command.
        """
        tools = str(Path(sys.executable).parent)
        path = os.pathsep.join([tools, os.environ.get("PATH", "")])  # the launcher finds this interpreter's own tools first
        launcher = shutil.which("deepspeed", path=path)
        if launcher is None:
            raise LabError("there is no `deepspeed` command (install deepspeed, or put its directory into PATH)")
        # without --master_addr it would ask host0 by ssh
        command = [sys.executable, launcher, "--no_ssh", "--node_rank", "{host}", "--hostfile", "{hostfile}",
                   "--master_addr", self.names[0], "--master_port", "{port}", str(script), *map(str, args)]
        options["env"] = {"PATH": path, **(options.get("env") or {})}
        return self.run(command, slots, per_host=True, **options)

    def on(self, host: int, command: Sequence[str]) -> str:
        """Run one short command on a host and return what it prints.

        Raises:
            LabError: it failed.
        """
        done = subprocess.run(self._hosts[host].enter(*command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise LabError(f"{self.names[host]}: {' '.join(command)} ended with {done.returncode}: {done.stdout.strip()}")
        return done.stdout

    def _wait(self, tasks: List[Task], timeout: float, grace: float, echo: bool) -> Tuple[str, Optional[int]]:
        """Wait until all ended, or until it is time to end them. Returns the status and the rank that failed first."""
        deadline, first_failure = time.monotonic() + timeout, None
        while True:
            running = [task for task in tasks if not task.ended()]
            failed = [rank for rank, task in enumerate(tasks) if task.process.returncode]
            if failed and first_failure is None:
                first_failure = failed[0]
                grace_ends = time.monotonic() + grace
            if echo:
                for task in tasks:
                    task.show()
            if not running:
                return ("failed" if failed else "ok"), first_failure
            if failed and time.monotonic() > grace_ends:
                return "failed", first_failure
            if time.monotonic() > deadline:
                return "timeout", first_failure
            time.sleep(0.03)

    def _end(self, tasks: List[Task]) -> None:
        """End whatever still runs on the hosts, also what left its process group or does not mind SIGTERM."""
        if not all(task.ended() for task in tasks):
            self._signal("TERM")
            _until(lambda: all(task.ended() for task in tasks), 1.0)
        self._signal("KILL")
        if not _until(lambda: all(task.ended() for task in tasks), 1.0):
            for task in tasks:  # a command that had not yet arrived on its host
                if not task.ended():
                    os.killpg(task.process.pid, signal.SIGKILL)
            _until(lambda: all(task.ended() for task in tasks), 5.0)
            self._signal("KILL")

    def _signal(self, name: str) -> None:
        """Send a signal to every process of every host, except the one that keeps the host up."""
        # to -1: everything in the sender's own process namespace, which the kernel spares its process 1
        senders = [subprocess.Popen(host.enter("sh", "-c", f"kill -{name} -1"), stderr=subprocess.DEVNULL) for host in self._hosts]
        for sender in senders:
            sender.wait()

    # counters -----------------------------------------------------------------------------------------------------------------

    def sent_bytes(self) -> List[int]:
        """Bytes that each host's network card has sent since the lab is up."""
        tables = [Path(f"/proc/{host.pid}/net/dev").read_text() for host in self._hosts]  # of that process's network
        return [int(table.split("eth0:")[1].split()[8]) for table in tables]

    def drops(self) -> int:
        """Packets that any queue of the lab has dropped since the lab is up."""
        return sum(int(queue.get("drops", 0)) for each in (*self._hosts, self._switch)
                   for queue in json.loads(each.network("tc -s -j qdisc show")))


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _start_time(pid: int) -> Optional[str]:
    """When a process started, in ticks since boot; None if there is none. With its id it names a process for good."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return None


def clean() -> List[str]:
    """Remove what labs left whose owner was killed: their directories, and processes should any have survived. Returns the
    directories. Labs whose owner lives are not touched."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_MARK}*"):
        owner, started = folder.name[len(_MARK):].split("-")[:2]
        if _start_time(int(owner)) == started or not folder.exists() or folder.stat().st_uid != os.geteuid():
            continue  # its owner lives, or has just removed it, or somebody else put it there
        processes = folder / "processes"
        for line in processes.read_text().splitlines() if processes.exists() else ():
            pid, started = line.split()
            if _start_time(int(pid)) == started:
                os.kill(int(pid), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(str(folder))
    return removed


# the command --------------------------------------------------------------------------------------------------------------


def main(argv: Optional[Sequence[str]] = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    argv, command = argv[:cut], argv[cut + 1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    network = argparse.ArgumentParser(add_help=False)
    network.add_argument("--hosts", type=int, default=4)
    network.add_argument("--rate", type=float, default=200.0, help="Mbit/s per network card and direction (200)")
    network.add_argument("--latency-class", default="base", help="only 'base', what the machine itself takes: nothing is added")
    run = actions.add_parser("run", parents=[network], help="run `-- command` once per rank; {rank}, {host}, {port}, {hostfile} in "
                             "it are replaced")
    run.add_argument("--ranks-per-host", type=int, default=1)
    run.add_argument("--per-host", action="store_true", help="once per host instead, for launchers")
    run.add_argument("--timeout", type=float, default=600.0, help="seconds")
    run.add_argument("--nice", type=int, default=-10)
    run.add_argument("--echo", action="store_true", help="print lines as they come, with their rank before them")
    actions.add_parser("check", parents=[network], help="measure the network and compare it with theory")
    actions.add_parser("clean", help="remove what killed labs left behind")
    args = parser.parse_args(argv)
    if args.action == "run" and not command:
        parser.error("say what to run after --")
    try:
        if args.action == "clean":
            print("\n".join(f"removed {folder}" for folder in clean()) or "nothing to remove")
            return 0
        with Lab(args.hosts, args.rate, args.latency_class) as lab:
            if args.action == "check":
                from lab_check import check
                print(check(lab))
                return 0
            result = lab.run(command, args.ranks_per_host, per_host=args.per_host, timeout=args.timeout, nice=args.nice,
                             echo=args.echo)
        if not args.echo:
            for rank, output in enumerate(result.outputs):
                print(f"--- rank {rank}\n{output}", end="")
        print(f"lab: {result}")
        return {"ok": 0, "failed": 1, "timeout": 124}[result.status]
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    from lab import main as main_of_module  # not this copy of the module: lab_check raises the LabError of that one
    sys.exit(main_of_module())
