"""The way of the suites to a device, with the host in the device's place."""

import itertools

import pytest
import torch

from spec_kernels import compact, hidden_capture
from spec_kernels.ops import common
from spec_kernels.testing import attention_cases, on_device
from spec_kernels.testing.compare import poisoned

counter = itertools.count()


@pytest.fixture
def through():
    """A backend that runs ``kernel(*args)`` on copies of its arguments."""

    def register(kernel=None):
        name = f"copied_{next(counter)}"
        names.append(name)

        def choose(op):
            return kernel or getattr(torch.ops.spec_kernels, op).default

        on_device.register(name, "cpu", choose)
        return name

    names = []
    yield register
    for name in names:
        del common.EXTRA_BACKENDS[name], on_device._registered[name]


@pytest.mark.parametrize("form", ["gqa", "mla"])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["16-bit", "fp8"])
def test_results_are_those_of_a_direct_call(form, cache_dtype, through):
    """Views that share a storage, poison, optional tensors."""
    problem = attention_cases.make(
        form, torch.bfloat16, contexts=(5, 70), cache_dtype=cache_dtype, with_sinks=True
    )
    direct, copied = problem.run(None), problem.run(through())
    for a, b in zip(direct, copied, strict=True):
        assert a.equal(b)


def test_lists_and_tensors_in_place(through):
    rows = torch.arange(12).view(2, 6)
    two = torch.zeros(2, dtype=torch.int32)
    path = torch.tensor([[0, 3], [0, 1]])
    tables = torch.zeros(2, 1, dtype=torch.int64)
    compact(path, two + 1, two.long(), tables, [], [rows], backend=through())
    assert rows[:, :2].tolist() == [[0, 3], [6, 7]]


def test_strides_and_what_stands_between_rows(through):
    wide = poisoned(4, 20, dtype=torch.float32)
    wide[:, 2:10] = 1.0
    normed = poisoned(4, 16, dtype=torch.float32)
    hidden_capture(
        torch.ones(4, 8), wide[:, 2:10], torch.ones(8), 0.0, out=normed[:, 8:], backend=through()
    )
    assert wide[:, 2:10].eq(2.0).all() and wide[:, :2].isnan().all() and wide[:, 10:].isnan().all()
    assert normed[:, 8:].allclose(torch.ones(4, 8)) and normed[:, :8].isnan().all()


def test_arguments_keep_their_alignment(through):
    starts = []

    def kernel(x, residual, weight, eps, out, capture, slot):
        starts.extend(t.data_ptr() % 16 for t in (residual, out))

    buffer = torch.zeros(9, 4)
    hidden_capture(None, buffer.flatten()[1:9].view(2, 4), torch.ones(4), 0.0, out=buffer[:2] * 0,
                   backend=through(kernel))  # fmt: skip
    assert starts == [4, 0]


def run_capture(backend, weight):
    return hidden_capture(None, torch.ones(2, 8), weight, 0.0, backend=backend)


def test_a_write_to_an_input_shows(through):
    weight = torch.ones(8)
    run_capture(through(lambda x, residual, weight, *rest: weight.zero_()), weight)
    assert weight.eq(0).all()


@pytest.mark.parametrize("beside", [-1, 1], ids=["before", "behind"])
def test_a_write_beside_a_tensor_is_an_error(through, beside):
    def kernel(x, residual, weight, eps, out, capture, slot):
        place = weight.storage_offset() + (8 if beside > 0 else -1)
        weight.as_strided((1,), (1,), place).zero_()

    with pytest.raises(AssertionError, match="hidden_capture wrote outside its tensors"):
        run_capture(through(kernel), torch.ones(8))


def test_errors_arrive_as_they_are(through):
    with pytest.raises(ValueError, match="spec_kernels::compact: .*got 99"):
        compact(
            torch.tensor([[99]]), torch.tensor([0]), torch.tensor([0]), torch.tensor([[0]]),
            [torch.zeros(1, 4, 2)], backend=through(),
        )  # fmt: skip


def test_an_op_without_a_kernel_is_not_its_reference(monkeypatch):
    monkeypatch.setattr(on_device._library, "has_kernel", lambda *_: False)
    with pytest.raises(RuntimeError, match="compact: no CUDA kernel"):
        on_device._cuda("compact")


def test_there_is_a_reason_where_there_is_no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert on_device.missing() in ("torch was built without CUDA", "torch finds no CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert on_device.missing() is None
