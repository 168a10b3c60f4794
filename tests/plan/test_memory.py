"""Bytes per parameter, by hand; tests/runtime/test_memory.py holds the whole prediction to what real ranks hold."""

import pytest

from ds_fold.plan.memory import GIB, States, describe_efficiency, memory_efficiency

BF16 = {"bf16": {"enabled": True}}
BF16_IN_FP32 = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize("config,zero,D,owned,expected", [
    # per byte of a parameter: gradients, optimizer, while reduced, averages
    ({}, 0, 4, False, (1, 2, 0, 0)),
    ({}, 1, 4, False, (1, 3 / 4, 0, 0)),  # DeepSpeed's ZeRO-1 has masters of its own even in fp32
    ({}, 1, 4, True, (1, 2 / 4, 3 / 4, 1 / 4)),
    ({}, 0, 4, True, (1, 2, 0, 0)),
    ({}, 2, 1, True, (1, 2, 1, 1)),
    (BF16, 0, 4, False, (1, 12 / 4 / 2, 0, 0)),
    (BF16, 2, 4, True, (1, 12 / 4 / 2, 1 + 3 / 4, 4 / 4 / 2)),
    (BF16_IN_FP32, 1, 4, True, (2, 12 / 4 / 2, 1 + 3 / 4, 4 / 4 / 2)),
    (BF16_IN_FP32, 1, 2, False, (2, 12 / 2 / 2, 0, 0)),
    ({"fp16": {"enabled": True}, "communication_data_type": "fp32"}, 0, 4, True, (1, 6, 2, 2)),
    ({"optimizer": {"type": "SGD"}}, 0, 1, True, (1, 0, 0, 0)),
    ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, 0, 1, True, (1, 1, 0, 0)),
])
def test_states_by_precision_and_stage(config, zero, D, owned, expected):
    assert States.of_config(config, zero, D, owned)[:4] == pytest.approx(expected)


def test_memory_efficiency_is_the_papers():
    """HIPPIE (TPDS 2023) reports 80 % more throughput with 57 % less memory, 1.80 / 0.43 = 4.18 times the memory efficiency."""
    ratio = memory_efficiency(1.80, 0.43 * GIB) / memory_efficiency(1.0, GIB)
    assert int(100 * ratio) == 418
    assert memory_efficiency(6.0, 2 * GIB) == 3.0 and memory_efficiency(6.0, 0) is None
    assert describe_efficiency(6.0, 0) == "throughput 6 samples/s"
