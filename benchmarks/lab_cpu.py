"""What a run in the lab cost the machine, and whether its timing can be trusted.

    ranks:   with timed(): ...         the CPU time of what runs in here, into a file of the run
    lab:     timed_use(folder)         -> CpuUse, shares of the whole machine
             distrust(cpu, drops)      -> the reasons why the network did not set the pace
"""

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, List, NamedTuple, Optional, Sequence

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuUse(NamedTuple):
    """Shares (0 to 1) of the whole machine's CPU time."""
    own: float  # the ranks themselves
    busy: float  # everything but idle, steal included
    user: float
    system: float  # interrupts included
    steal: float  # taken by other machines on the same hardware

    def __str__(self) -> str:
        return ", ".join(f"{name} {100 * share:.0f} %" for name, share in zip(self._fields, self))


def cpu_ticks() -> List[int]:
    """The machine's CPU time so far, in ticks: user, nice, system, idle, iowait, irq, softirq, steal."""
    with open("/proc/stat") as file:
        return [int(word) for word in file.readline().split()[1:9]]


def cpu_use(ticks: Sequence[int], own_s: float) -> CpuUse:
    """Shares of the machine from the difference of two :func:`cpu_ticks` and the CPU seconds of the ranks."""
    user, nice, system, idle, iowait, irq, softirq, steal = ticks
    total = max(1, sum(ticks))
    return CpuUse(own_s * _TICKS_PER_S / total, 1 - (idle + iowait) / total, (user + nice) / total,
                  (system + irq + softirq) / total, steal / total)


def distrust(cpu: CpuUse, drops: int) -> List[str]:
    """Why a result with this CPU use and this number of dropped packets is not one of the network. Empty: it can be trusted."""
    limits = [("the ranks' own CPU time", cpu.own, 0.35, "the CPU may have set the pace; use a lower rate or fewer ranks"),
              ("the CPU's busy time", cpu.busy, 0.85, "the CPU may have set the pace; wait until other work is over"),
              ("stolen CPU time", cpu.steal, 0.05, "another machine took the CPU; run again")]
    flags = [f"{name} is {100 * share:.0f} % of the machine, more than {100 * limit:.0f} %: {why}"
             for name, share, limit, why in limits if share > limit]
    if drops > 0:
        flags.append(f"{drops} packets were dropped: TCP slowed down by itself; send less at once to one host")
    return flags


@contextmanager
def timed() -> Iterator[None]:
    """For ranks: the CPU shares in the result are those of what runs in here, instead of those of the whole run with its
    imports. Every rank should use it, around the same steps. Does nothing outside a lab."""
    before, own = cpu_ticks(), sum(os.times()[:4])
    yield
    if "LAB_RUN_DIR" in os.environ:
        ticks = [b - a for a, b in zip(before, cpu_ticks())]
        with open(f"{os.environ['LAB_RUN_DIR']}/{os.uname().nodename}-{os.getpid()}.timed", "a") as file:
            file.write(json.dumps([ticks, sum(os.times()[:4]) - own]) + "\n")


def timed_use(folder: Path) -> Optional[CpuUse]:
    """The CPU use of what the ranks did within :func:`timed`. The machine's share is what one of them saw."""
    ticks, own_s = None, 0.0
    for file in sorted(folder.glob("*.timed")):
        parts = [json.loads(line) for line in file.read_text().splitlines()]
        ticks = ticks or [sum(column) for column in zip(*(part[0] for part in parts))]
        own_s += sum(part[1] for part in parts)
    return cpu_use(ticks, own_s) if ticks else None
