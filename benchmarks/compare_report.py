"""What a comparison's raw times say: one row per contender, as a Markdown table and as a chart."""

import statistics
from pathlib import Path
from typing import Any, Dict, List

from setting import Setting

#: largest difference of a layer's checksums from the reference's, relative to the layer's norm; and where gradients travelled in
#: bf16, whose mantissa has 8 bits
TOLERANCE, BF16_TOLERANCE = 1e-6, 2.0**-8


def rows_of(measured: Dict[str, Any], reference: str) -> List[Dict[str, Any]]:
    """One dict per contender.

    Keys: step_s [median, lowest, highest]; ratio of throughput to the reference; free_s, the step with data-parallel
    communication off; exposed_s = step - free; hidden, the share of an all-reduce of the gradients that is not exposed (1: all);
    bubble, the share of free_s in which a rank does not compute; slots, live activations at the peak in forwards of a whole
    rank; memory_mb of parameters, gradients and live activations; right: the same weights as the reference on all replicas.
    """
    setting = Setting(**measured["setting"])
    base = measured["contenders"][reference]
    base_s = statistics.median(base["times"]["on"])
    rows = []
    for name, contender in measured["contenders"].items():
        on, off = contender["times"]["on"], contender["times"]["off"]
        step_s, free_s, live = statistics.median(on), statistics.median(off), contender["peak_live_layers"]
        rows.append({
            "name": name,
            "step_s": [step_s, min(on), max(on)],
            "ratio": base_s / step_s,
            "free_s": free_s,
            "exposed_s": step_s - free_s,
            "hidden": 1 - (step_s - free_s) / measured["all_reduce_s"] if measured["all_reduce_s"] else None,
            "bubble": 1 - setting.compute_s / free_s,
            "slots": live / (setting.layers / setting.P),
            "memory_mb": (2 * setting.parameter_bytes + live * setting.activation_bytes) / 1e6,
            "right": contender["replicas_agree"] and same_weights(
                contender["checksums"], base["checksums"], BF16_TOLERANCE if "bf16" in name else TOLERANCE),
        })
    return rows


def same_weights(mine: Dict[str, List[float]], theirs: Dict[str, List[float]], tolerance: float = TOLERANCE) -> bool:
    """Whether the checksums (sum, sum of squares, first, last weight) of all layers agree."""
    return set(mine) == set(theirs) and all(
        abs(a - b) <= tolerance * max(1.0, theirs[layer][1]) for layer in mine for a, b in zip(mine[layer], theirs[layer]))


def describe(measured: Dict[str, Any]) -> str:
    s, lab = Setting(**measured["setting"]), measured["lab"]
    return (f"P={s.P}, D={s.D}, M={s.M}, {lab['ranks_per_host']} rank(s) a host, {lab['rate_mbit']:g} Mbit/s, {s.layers} layers of "
            f"{1000 * s.forward_s:g} ms, {s.activation_bytes // 1024} KB activations, {s.parameter_bytes / 1e6:.1f} MB of "
            f"parameters a rank, aimed at {100 * measured['share']:.0f} % exposed")


def table(measured: Dict[str, Any]) -> str:
    """Markdown."""
    lines = [f"**{describe(measured)}** ({measured['date']})", "",
             "| | step ms (min-max) | throughput | no communication, ms | exposed, ms | hidden | bubble | slots | MB | weights |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for row in measured["rows"]:
        median, low, high = (1000 * t for t in row["step_s"])
        hidden = "-" if row["hidden"] is None else f"{100 * row['hidden']:.0f} %"
        lines.append(f"| {row['name']} | {median:.0f} ({low:.0f}-{high:.0f}) | {row['ratio']:.2f}x | {1000 * row['free_s']:.0f} | "
                     f"{1000 * row['exposed_s']:.0f} | {hidden} | {100 * row['bubble']:.0f} % | {row['slots']:.1f} | "
                     f"{row['memory_mb']:.1f} | {'same' if row['right'] else '**WRONG**'} |")
    cpu, lab = measured["lab"]["cpu"], measured["lab"]
    lines += ["", f"All-reduce of the gradients alone: {1000 * measured['all_reduce_s']:.0f} ms. CPU: the ranks' own "
              f"{100 * cpu['own']:.0f} %, busy {100 * cpu['busy']:.0f} %, steal {100 * cpu['steal']:.0f} %; {lab['drops']} packets "
              f"dropped; {lab['wall_s']:.0f} s in all."]
    lines += [f"Not to be trusted: {flag}." for flag in lab["flags"]]
    return "\n".join(lines) + "\n"


def chart(results: List[Dict[str, Any]], path: Path) -> None:
    """Bars of a step: what it takes without data-parallel communication, and the exposed communication on top."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    bars = [(row["name"] if result["value"] is None else f"{row['name']}, {result['axis']} {result['value']}", row)
            for result in results for row in result["rows"]]
    figure, axes = plt.subplots(figsize=(10, 0.38 * len(bars) + 1.6))
    for y, (_, row) in enumerate(bars):
        color = "tab:blue" if row["name"].startswith("ds_fold") else "tab:gray"
        free, exposed = 1000 * row["free_s"], max(0.0, 1000 * row["exposed_s"])
        axes.barh(y, free, color=color)
        axes.barh(y, exposed, left=free, color=color, alpha=0.35, hatch="///", edgecolor="white")
        note = f" {row['ratio']:.2f}x" + ("" if row["right"] else " WRONG WEIGHTS")
        axes.text(free + exposed, y, note, va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step (hatched: exposed data-parallel communication); throughput against DeepSpeed 1F1B")
    axes.set_title(describe(results[0]), fontsize=8)
    axes.margins(x=0.1)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
