"""Links between GPUs: the record of what was measured."""

import json

import pytest

from spec_kernels.comm.p2p import FlowMeasurement, GpuId, LinkMeasurements

GPUS = [GpuId(f"GPU-{i}", f"0000:{i:02x}:00.0") for i in range(3)]


def test_measurements_survive_json():
    rates = [[None, 50.5, 1.0], [2.0, None, 0.0], [3.0, 4, None]]
    flows = [FlowMeasurement(((0, 1), (2, 1)), 2.7, 51.1), FlowMeasurement(((0, 2),), read=1.0)]
    some = LinkMeasurements(GPUS, pair_write_gb_s=rates, flows=flows)
    assert LinkMeasurements.from_json(some.to_json()) == some
    plain = json.loads(some.to_json())
    assert plain["flows"][0] == {"flows": [[0, 1], [2, 1]], "write": 2.7, "read": 51.1}
    assert plain["flag_us"] == [[None] * 3] * 3 and plain["pair_write_gb_s"] == rates


@pytest.mark.parametrize(
    "text, said",
    [
        ("no json", "to_json"),
        ("[]", "to_json"),
        ("{}", "to_json"),
        ('{"gpus": [{"uuid": "a"}]}', "to_json"),
        ('{"gpus": [], "more": 1}', "to_json"),
        ('{"gpus": [], "flows": [{"flows": [[0, 1]]}]}', "below 0"),
        ('{"gpus": [{"uuid": "a", "pci": "b"}], "flag_us": [[1, 2]]}', r"\[1\]\[1\]"),
        ('{"gpus": [{"uuid": "a", "pci": "b"}], "flag_us": [["x"]]}', "'x'"),
        ('{"gpus": [{"uuid": "a", "pci": "b"}], "flag_us": [[NaN]]}', "nan"),
        ('{"gpus": [{"uuid": "a", "pci": "b"}], "flag_us": [[-1]]}', "-1"),
    ],
)
def test_what_is_no_measurement_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        LinkMeasurements.from_json(text)
