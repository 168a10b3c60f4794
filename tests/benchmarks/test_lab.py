"""The network lab: what its hosts can and cannot reach, how its runs end, and whether its network has the speed it should."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import lab_check  # noqa: E402
from lab import CpuUse, Lab, LabError, clean, distrust, main, missing, require, shaping  # noqa: E402
from lab_check import Figure, Report, all_reduce_s, check, one_way_s  # noqa: E402
from lab_cpu import cpu_use  # noqa: E402

LACKS = missing()
needs_lab = pytest.mark.skipif(bool(LACKS), reason=f"the network lab cannot run here. Missing: {'; '.join(LACKS)}")
QUIET = CpuUse(own=0.2, busy=0.4, user=0.2, system=0.2, steal=0.0)
seen = set()  # the network namespaces of every lab of this module


@contextmanager
def a_lab(*args, **kwargs):
    with Lab(*args, **kwargs) as lab:
        seen.update(os.readlink(f"/proc/{each.pid}/ns/net") for each in (lab._switch, *lab._hosts))
        yield lab


@pytest.fixture(scope="module")
def lab():
    """One lab for the tests that leave it as it was. Whatever ran in it, nothing is left of any lab at the end."""
    with a_lab(hosts=2, rate_mbit=200) as lab:
        folder = lab._dir
        yield lab
    assert not folder.exists()
    assert not seen & namespaces()


def namespaces():
    found = set()
    for process in Path("/proc").glob("[0-9]*/ns/net"):
        with suppress(OSError):  # it may just have ended
            found.add(os.readlink(process))
    return found


def processes(mark):
    """How many processes on this machine, in whatever namespace, have ``mark`` as an argument."""
    count = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            count += mark in file.read_text().split("\0")
    return count


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


PRELUDE = """
import os, socket, sys, time
rank = int(os.environ['RANK'])
def connect_to_host0(port):
    while True:
        try:
            return socket.create_connection(("host0", port))
        except ConnectionRefusedError:  # it does not listen yet
            time.sleep(0.01)
"""


def python(code, *args):
    return [sys.executable, "-c", PRELUDE + code, *map(str, args)]


# without a lab ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate, granule, burst, queue, unsent", [
    (10, 4096, 7096, 4000000, 8192),  # no smaller than 4 KB
    (100, 5000, 8000, 4000000, 10000),
    (200, 10000, 13000, 4000000, 20000),
    (1000, 50000, 53000, 6250000, 100000),
    (4000, 65536, 68536, 25000000, 131072),  # no larger than 64 KB
])
def test_shaping_follows_the_rate(rate, granule, burst, queue, unsent):
    assert shaping(rate) == (granule, burst, queue, unsent)


def test_theory():
    assert one_way_s(1448, 1514 * 8 / 1e6) == pytest.approx(1.0)  # a full packet's data on a line of one full packet per second
    assert all_reduce_s(10**6, 200, 2) == pytest.approx(one_way_s(10**6, 200))
    assert all_reduce_s(10**6, 200, 8) == pytest.approx(1.75 * one_way_s(10**6, 200))
    assert Figure("x", 0.9, 1.0).off == pytest.approx(-0.1)


def test_cpu_shares_come_from_ticks():
    use = cpu_use([10, 10, 20, 30, 10, 5, 5, 10], own_s=25 / os.sysconf("SC_CLK_TCK"))
    assert use == pytest.approx(CpuUse(own=0.25, busy=0.6, user=0.2, system=0.3, steal=0.1))


@pytest.mark.parametrize("cpu, drops, words", [
    (QUIET, 0, []),
    (QUIET._replace(own=0.36), 0, ["own CPU time is 36 % of the machine, more than 35 %"]),
    (QUIET._replace(busy=0.9), 0, ["busy time is 90 % of the machine, more than 85 %"]),
    (QUIET._replace(steal=0.06), 0, ["stolen CPU time is 6 % of the machine, more than 5 %"]),
    (QUIET._replace(own=0.5, busy=1.0), 3, ["50 %", "100 %", "3 packets were dropped"]),
])
def test_results_that_the_network_did_not_set_are_flagged(cpu, drops, words):
    flags = distrust(cpu, drops)
    assert len(flags) == len(words) and all(word in flag for word, flag in zip(words, flags))


def test_what_is_missing_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError) as error:
        require()
    assert str(error.value) == ("the network lab cannot run here. Missing: the commands ip, tc (install iproute2); the commands "
                                "unshare, nsenter, setpriv (install util-linux); root (run it with sudo)")


@pytest.mark.parametrize("passed, need", enumerate(["the right to make namespaces", "the right to mount", "veth devices",
                                                    "bridge devices", "the tbf queue"]))
def test_what_the_kernel_lacks_is_named(passed, need, tmp_path, monkeypatch):
    for tool in ("ip", "tc", "unshare", "nsenter", "setpriv"):
        (tmp_path / tool).write_text("#!/bin/sh\n" + "echo up\n" * passed + "echo Operation not permitted >&2\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    lacks, = missing()
    assert lacks.startswith(need) and lacks.endswith(": Operation not permitted")


@pytest.mark.parametrize("arguments, words", [
    (dict(hosts=0, rate_mbit=200), "hosts=0 must be between 1 and 250"),
    (dict(hosts=2, rate_mbit=0), "rate_mbit=0 must be between"),
    (dict(hosts=2, rate_mbit=200, latency_class="wan"), "latency class 'wan' cannot be emulated: .*netem.* Use 'base'"),
])
def test_impossible_arguments(arguments, words):
    with pytest.raises(LabError, match=words):
        Lab(**arguments)


def test_nothing_runs_in_a_lab_that_is_not_up():
    with pytest.raises(LabError, match="use it in a with statement"):
        Lab(2, 200).run(["true"])


def test_the_command_reports_errors(capsys):
    assert main(["check", "--hosts", "2", "--latency-class", "wan"]) == 2
    assert "lab: latency class 'wan' cannot be emulated" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "--hosts", "2"])
    assert "say what to run after --" in capsys.readouterr().err


def test_a_network_off_theory_fails_the_check(monkeypatch):
    class Cluster:
        hosts = 2
    reports = [Report([Figure("4 MB one way", measured, 0.2)], 1e-4, 1e-3, QUIET, [], 1.0) for measured in (0.25, 0.17, 0.21)]
    monkeypatch.setattr(lab_check, "measure", lambda lab, python: reports.pop(0))
    assert check(Cluster).figures[0].measured_s == 0.21, "the third attempt counts"
    reports = [Report([Figure("one way", way, 0.2), Figure("all-reduce", all_reduce, 0.2)], 1e-4, 1e-3, QUIET, [], 1.0)
               for way, all_reduce in ((0.21, 0.3), (0.3, 0.19))]
    assert not check(Cluster).wrong, "each was right once"
    reports = [Report([Figure("4 MB one way", 0.17, 0.2)], 1e-4, 1e-3, QUIET, [], 1.0)] * 2
    with pytest.raises(LabError) as error:
        check(Cluster, attempts=2)
    for words in ("in 2 attempts", "4 MB one way: 170.0 ms, theory 200.0 ms (-15.0 %)", "own 20 %, busy 40 %"):
        assert words in str(error.value)
    with pytest.raises(LabError, match="at least two hosts"):
        Cluster.hosts = 1
        check(Cluster)


# hosts --------------------------------------------------------------------------------------------------------------------


@needs_lab
def test_hosts_see_each_other_by_name_and_nothing_else(lab):
    result = lab.run(python("""
assert socket.gethostname() == f"host{rank}"
open(f"/dev/shm/of_rank_{rank}", "w")
if rank == 0:
    with socket.create_server(("", 5000)) as server:
        peer, (address, _) = server.accept()
        print("rank 1 came from", address)
        peer.recv(1)
else:
    to_host0 = connect_to_host0(5000)
    print("shared memory:", os.listdir("/dev/shm"))
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=5)
    except OSError as error:
        print("elsewhere:", error)
"""))
    assert result.ok, result.outputs
    assert result.outputs == ["rank 1 came from 10.99.0.2\n",
                              "shared memory: ['of_rank_1']\nelsewhere: [Errno 101] Network is unreachable\n"]
    for host in (0, 1):
        routes = lab.on(host, ["ip", "-o", "route"]).splitlines()
        assert len(routes) == 1 and routes[0].startswith("10.99.0.0/24 dev eth0 "), "no default route"
        links = lab.on(host, ["ip", "-o", "link"]).splitlines()
        assert len(links) == 2 and " lo:" in links[0] and " eth0@" in links[1]


@needs_lab
def test_ranks_find_the_usual_variables(lab, monkeypatch):
    monkeypatch.setenv("LOCAL_SIZE", "9")  # of some launcher around this process
    monkeypatch.setenv("RANK", "9")
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR GLOO_SOCKET_IFNAME OMP_NUM_THREADS LOCAL_SIZE MINE"
    variables = " ".join(f"${{{name}-none}}" for name in names.split())
    script = f"echo {variables} {{rank}} {{host}}; pwd; nice; test $MASTER_PORT = {{port}}"
    result = lab.run(["sh", "-c", script], ranks_per_host=2, env={"MINE": "x"}, nice=-7)
    assert result.exit_codes == [0] * 4
    for rank, output in enumerate(result.outputs):
        first, cwd, nice = output.splitlines()
        assert first == f"{rank} 4 {rank % 2} 2 {rank // 2} host0 eth0 1 none x {rank} {rank // 2}"
        assert (cwd, nice) == (os.getcwd(), "-7")
    result = lab.run(["sh", "-c", "echo ${RANK-none} $NODE_RANK $NNODES; cat {hostfile}"], ranks_per_host=3, per_host=True)
    assert result.outputs == [f"none {host} 2\nhost0 slots=3\nhost1 slots=3\n" for host in (0, 1)]


@needs_lab
def test_bytes_on_the_wire_and_their_time_are_known(lab):
    result = lab.run(python("""
sys.path.insert(0, sys.argv[1])
from lab import timed
if rank == 0:
    with socket.create_server(("", 5001)) as server, timed():
        peer, _ = server.accept()
        start, left = time.monotonic(), 2500000
        while left:
            left -= len(peer.recv(left))
        print(time.monotonic() - start)
else:
    while sum(os.times()[:2]) < 0.5:
        pass  # an import, say: it does not count
    with timed():
        to_host0 = connect_to_host0(5001)
        to_host0.sendall(bytes(2500000))
""", BENCHMARKS))
    assert result.ok, result.outputs
    assert float(result.outputs[0]) == pytest.approx(one_way_s(2500000, 200), rel=0.25)  # 105 ms; the check is the strict one
    assert 2500000 < result.sent_bytes[1] < 2700000 and result.sent_bytes[0] < 200000
    assert result.drops == 0
    assert result.rank_cpu_s[1] > 0.5
    assert result.cpu.own < 0.3, "the share of the timed part, which waits"


@needs_lab
def test_drops_are_counted_and_flagged():
    with a_lab(hosts=2, rate_mbit=10) as lab:
        lab._hosts[0].network("tc qdisc replace dev eth0 root tbf rate 1mbit burst 4kb limit 8kb")  # a far too short queue
        result = lab.run(python("""
if rank == 0:
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(100):
        sender.sendto(bytes(1400), ("host1", 9))
"""))
        assert result.ok and 50 < result.drops <= 100
        assert any(flag.startswith(f"{result.drops} packets were dropped") for flag in result.flags)


# how runs end -------------------------------------------------------------------------------------------------------------


@needs_lab
def test_a_failing_rank_ends_the_others(lab):
    result = lab.run(["sh", "-c", "test {rank} != 1 || exit 7; sleep 4711.1"], grace=0.3)
    assert (result.status, result.exit_codes, result.first_failure) == ("failed", [-signal.SIGTERM, 7], 1)
    assert result.wall_s < 3 and "failed (rank 1 first)" in str(result)
    assert not processes("4711.1")
    result = lab.run(["sh", "-c", "test {rank} != 1 || exit 7; sleep 0.3; exit 5"], grace=10)
    assert (result.exit_codes, result.first_failure) == ([5, 7], 1), "within the grace it ends by itself"
    assert lab.run(["sh", "-c", "kill -SEGV $$"]).exit_codes == [-signal.SIGSEGV] * 2
    result = lab.run(["no-such-command"])
    assert result.exit_codes == [127] * 2 and "no-such-command: No such file" in result.outputs[0]


@needs_lab
def test_a_timeout_ends_children_that_ignore_it(lab):
    result = lab.run(["sh", "-c", "trap '' TERM; setsid sleep 4711.2 & echo begun; sleep 1000"], timeout=1.0)
    assert (result.status, result.exit_codes, result.first_failure) == ("timeout", [-signal.SIGKILL] * 2, None)
    assert result.outputs == ["begun\n"] * 2
    assert until(lambda: not processes("4711.2"))
    assert lab.run(["true"]).ok, "the lab itself is fine"


@needs_lab
def test_nothing_of_a_run_stays_on_the_hosts(lab):
    assert lab.run(["sh", "-c", "setsid sleep 4711.3 & sleep 0.1"]).ok
    assert until(lambda: not processes("4711.3"))


@needs_lab
def test_echo_puts_the_rank_before_each_line(lab, capsys):
    lab.run(["sh", "-c", "echo one; sleep 0.1; printf 'tw'; sleep 0.1; printf o"], echo=True)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["[0] one", "[0] two", "[1] one", "[1] two"]


@needs_lab
def test_an_exception_takes_the_lab_down():
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(KeyError), a_lab(1, 100) as lab:
            folder = lab._dir
            with pytest.raises(LabError, match="up already"):
                lab.__enter__()
            raise KeyError
        assert not folder.exists() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, handler)


def owner(mark):
    """A lab of another process whose ranks, and children of theirs that left the process group, sleep."""
    command = ["sh", "-c", f"trap '' TERM; setsid sleep {mark} & sleep {mark}; wait"]
    process = subprocess.Popen([sys.executable, BENCHMARKS / "lab.py", "run", "--hosts", "2", "--", *command],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert until(lambda: processes(mark) == 4)
    folder, = Path(tempfile.gettempdir()).glob(f"ds_fold-lab-{process.pid}-*")
    return process, folder


@needs_lab
def test_a_killed_owner_leaves_only_what_clean_removes(lab, capsys):
    process, folder = owner("4711.4")
    pids = [int(line.split()[0]) for line in (folder / "processes").read_text().splitlines()]
    left = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
    assert len(left) == 3, "two hosts and the switch"
    process.kill()
    process.communicate()
    assert until(lambda: not processes("4711.4") and not left & namespaces())
    assert folder.exists()
    assert main(["clean"]) == 0
    assert f"removed {folder}" in capsys.readouterr().out
    assert not folder.exists() and lab._dir.exists(), "labs of living owners stay"
    assert str(folder) not in clean()


@needs_lab
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_to_the_owner_takes_everything_down(number, code):
    process, folder = owner(f"4711.5{number}")
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (code, b"")
    assert not processes(f"4711.5{number}") and not folder.exists()


@needs_lab
def test_labs_coexist(lab):
    with a_lab(hosts=1, rate_mbit=50) as other:
        # the same names and addresses in both, and no way from one to the other
        assert other.run(["hostname"]).outputs == ["host0\n"] == [lab.on(0, ["hostname"])]
        assert "rate 50Mbit" in other.on(0, ["tc", "qdisc", "show", "dev", "eth0"])
        assert "rate 200Mbit" in lab.on(0, ["tc", "qdisc", "show", "dev", "eth0"])
        with pytest.raises(LabError, match="host0: ip route get 192.0.2.1 ended with 2: .*unreachable"):
            other.on(0, ["ip", "route", "get", "192.0.2.1"])
    assert lab.run(["true"]).ok


# the network --------------------------------------------------------------------------------------------------------------


@needs_lab
def test_the_network_has_the_speed_of_theory(lab):
    try:
        report = check(lab, attempts=5)
    except LabError as error:
        if "not to be trusted" in str(error):  # other machines took the processors: says nothing about the network
            pytest.skip(str(error))
        raise
    assert [figure.name for figure in report.figures] == ["4 MB one way", "4 MB all-reduce over 2 hosts"]
    assert not report.wrong
    assert 0 < report.latency_s < 0.01
    # 10 times as long where it waits in the bulk's own connection; also taken by a machine that is busy
    assert report.latency_s < report.latency_in_bulk_s < 0.02
    print(report)


@needs_lab
def test_failing_ranks_fail_the_check(lab):
    with pytest.raises(LabError, match="ranks did not finish: failed"):
        check(lab, python="/bin/false")


@needs_lab
def test_a_real_launch_over_two_hosts(lab, tmp_path):
    script = tmp_path / "prints.py"
    script.write_text("""
import os, sys
print("I am", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename, sys.argv[-1], flush=True)
""")
    result = lab.launch_deepspeed(script, ["--flag"], slots=2, timeout=60)
    assert result.ok, result.outputs
    lines = sorted(line for output in result.outputs for line in output.splitlines() if line.startswith("I am"))
    assert lines == [f"I am {rank} of 4 on host{rank // 2} --flag" for rank in range(4)]
