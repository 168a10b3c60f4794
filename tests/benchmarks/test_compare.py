"""The comparison: emulated layers are exact and take their time, figures mean what they say, contenders train the same weights."""

import copy
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from compare_report import chart, rows_of, table  # noqa: E402
from emulated import EmulatedLayer, Live, batch_of  # noqa: E402
from lab import missing  # noqa: E402


def test_an_emulated_layer_has_the_gradients_of_its_formula_over_all_micro_batches():
    live = Live()
    layers = [EmulatedLayer(i, features=8, weights=20, forward_s=0.0, micro_batches=3, live=live, out_features=out, kept_bytes=9)
              for i, out in enumerate((8, 5))]
    plain = [(copy.deepcopy(layer.head), copy.deepcopy(layer.tail)) for layer in layers]
    for _step in range(2):
        for x, y in batch_of(0, 3, 8):
            h, expected = x, x
            for layer, (head, tail) in zip(layers, plain):
                h, expected = layer(h), (expected * (1 + head) + tail.mean())[:, :layer.out_features]
            y = y[:, :5]
            assert h.shape == (1, 5)
            assert torch.allclose(h, expected, atol=1e-6)
            (h - y).square().mean().backward()
            (expected - y).square().mean().backward()
        for layer, (head, tail) in zip(layers, plain):
            assert torch.allclose(layer.head.grad, head.grad, atol=1e-6)
            assert torch.allclose(layer.tail.grad, tail.grad, atol=1e-6) and layer.tail.grad.abs().max() > 0
            with torch.no_grad():  # a step: the next forwards must see it
                for mine, other in ((layer.head, head), (layer.tail, tail)):
                    mine -= 0.1 * mine.grad
                    other -= 0.1 * other.grad
                    mine.grad = other.grad = None
    assert live.now == 0 and live.peak == 2


def test_an_emulated_layer_takes_its_time():
    layer = EmulatedLayer(0, features=8, weights=20, forward_s=0.02, micro_batches=1, live=Live())
    x, _ = batch_of(0, 1, 8)[0]
    start = time.perf_counter()
    y = layer(x)
    forward = time.perf_counter() - start
    y.sum().backward()
    backward = time.perf_counter() - start - forward
    assert 0.02 <= forward < 0.035 and 0.04 <= backward < 0.06


def measured(**times):
    """A comparison of contenders with these (on, off) seconds."""
    setting = {"P": 2, "D": 2, "M": 4, "layers": 8, "forward_s": 0.005, "activation_bytes": 32768, "parameter_bytes": 4_000_000}
    contenders = {name.replace("_", " "): {"times": {"on": on, "off": off}, "checksums": {"0": [1.0, 4.0, 0.5, 0.1]},
                                           "replicas_agree": True, "peak_live_layers": 8} for name, (on, off) in times.items()}
    return {"setting": setting, "all_reduce_s": 0.2, "contenders": contenders, "share": 0.4, "date": "2026-01-01", "value": None,
            "axis": None, "lab": {"hosts": 4, "rate_mbit": 200, "ranks_per_host": 1, "drops": 0, "flags": ["too busy"],
                                  "cpu": {"own": 0.1, "busy": 0.2, "steal": 0.0}, "wall_s": 30}}


def test_figures_mean_what_they_say():
    rows = rows_of(measured(base=([0.5, 0.52, 0.48], [0.3]), better=([0.4, 0.41, 0.35], [0.32])), "base")
    base, better = rows
    assert base["ratio"] == 1 and better["ratio"] == pytest.approx(0.5 / 0.4)
    assert better["step_s"] == [0.4, 0.35, 0.41]
    assert base["exposed_s"] == pytest.approx(0.2) and base["hidden"] == pytest.approx(0)
    assert better["exposed_s"] == pytest.approx(0.08) and better["hidden"] == pytest.approx(0.6)
    assert base["bubble"] == pytest.approx(1 - 0.24 / 0.3)  # 4 layers x 4 micro-batches x 15 ms
    assert base["slots"] == 2 and base["memory_mb"] == pytest.approx(8 + 8 * 0.032768)


@pytest.mark.parametrize("change", [{"checksums": {"0": [1.0, 4.0, 0.5, 0.1001]}}, {"checksums": {}}, {"replicas_agree": False}])
def test_other_weights_than_the_references_are_marked_wrong(change, tmp_path):
    result = measured(base=([0.5], [0.3]), other=([0.4], [0.3]))
    result["contenders"]["other"].update(change)
    result["rows"] = rows_of(result, "base")
    assert [row["right"] for row in result["rows"]] == [True, False]
    text = table(result)
    assert "| other | 400 (400-400) | 1.25x | 300 | 100 | 50 % | 20 % | 2.0 | 8.3 | **WRONG** |" in text
    assert "Not to be trusted: too busy." in text
    chart([result], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 5000


@pytest.mark.skipif(bool(missing()), reason=f"the network lab cannot run here. Missing: {'; '.join(missing())}")
def test_contenders_of_all_four_kinds_train_the_same_weights_in_one_launch(tmp_path):
    from compare import CASES, REFERENCE, measure
    from lab import Lab
    setting = {**CASES["default"][0], "P": 2, "D": 1, "M": 4, "layers": 4, "forward_s": 0.001, "parameter_bytes": 200_000}
    contenders = {REFERENCE: ("deepspeed", {}), "dualpipev": ("dualpipev", {}), "torch": ("torch", {"schedule": "1f1b"}),
                  "aiao": ("ds_fold", {"schedule": "aiao", "segments": 2})}
    with Lab(2, 200) as lab:
        result = measure(lab, setting, 0.0, contenders, ranks_per_host=1, repeats=1, steps=1, launcher=True)
    rows = rows_of(result, REFERENCE)
    assert [row["name"] for row in rows] == list(contenders) and all(row["right"] for row in rows)
    assert all(len(c["checksums"]) == 4 for c in result["contenders"].values())
    assert all(row["step_s"][0] >= 0.024 for row in rows)  # 2 layers x 4 micro-batches x 3 ms, at least
    json.dumps(result)


def test_the_command_says_what_it_lacks(tmp_path):
    program = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import lab_hosts, os; os.geteuid = lambda: 1; " \
              f"sys.argv = ['compare.py', '--out', {str(tmp_path)!r}]; import compare; sys.exit(compare.main())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2 and "root (run it with sudo)" in done.stderr and not list(tmp_path.iterdir())
