"""Tensors that an op meets as torch has them: with gradients, or without memory."""

import fuzz_ops
import pytest
import torch

from spec_kernels import _library, ops

# A collective's sound call takes a workspace of its own.
OPS = sorted(name for name in fuzz_ops.MAKERS if not name.startswith("pcie_"))


@pytest.mark.parametrize("op", OPS)
def test_outputs_hold_no_graph(op):
    outs = fuzz_ops.outputs_of(op)
    kernels = [_library.REFERENCES[op], getattr(torch.ops.spec_kernels, op).default]
    for seed in range(4):
        for kernel in kernels:
            args = fuzz_ops.MAKERS[op](fuzz_ops.Case(seed))
            for i, t in enumerate(args):
                if i not in outs and isinstance(t, torch.Tensor) and t.is_floating_point():
                    args[i] = t.detach().requires_grad_()
            kernel(*args)
            assert not any(t.requires_grad for t in fuzz_ops.tensors_of([args[i] for i in outs]))


@pytest.mark.parametrize("op", ["rope_append", "rope_append_mla"])
def test_the_python_face_of_the_reference_holds_none_either(op):
    q, k, v = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4)
    cache, value_cache = torch.zeros(1, 8, 1, 4), torch.zeros(1, 8, 1, 4)
    lookup = (torch.ones(9, 4), torch.tensor([[0, 1]]), torch.tensor([0]), torch.tensor([[0]]))
    options = dict(interleaved=True, backend="reference")
    if op == "rope_append":
        out = ops.rope_append(q, k.requires_grad_(), v, cache, value_cache, *lookup, **options)
    else:
        weight = torch.nn.Parameter(torch.ones(4))
        latent, cache = v[:, :, 0], torch.zeros(1, 8, 8)
        out = ops.rope_append_mla(
            q, latent, k[:, :, 0], cache, *lookup, norm_weight=weight, **options
        )
    assert not cache.requires_grad and not out.requires_grad
    assert cache[0, 0].any()


@pytest.mark.parametrize("op", OPS)
def test_a_meta_tensor_among_real_ones_is_refused(op):
    """torch takes the fake for it: without a word, nothing would be written."""
    args = fuzz_ops.MAKERS[op](fuzz_ops.Case(0))
    function = getattr(torch.ops.spec_kernels, op).default
    places = [i for i, t in enumerate(args) if isinstance(t, torch.Tensor)]
    for i in places:
        some = [t.to("meta") if j == i else t for j, t in enumerate(args)]
        with pytest.raises(Exception, match=f"{op}: tensors: expected all on meta or none"):
            function(*some)
