"""
What another project does with the five files of the int4 kernel; prints the modules that it loaded.
"""

import sys
import torch
from fast.layout import pack, unpack

torch.manual_seed(0)
for N, K, C in (48, 256, 2), (560, 1024, 32), (64, 96, 1):
    codes, scales = torch.randint(16, (N, K), dtype=torch.uint8), torch.rand(N, C).half() / K**0.5
    zeros = torch.randint(1, 16, (N, C))
    packed = pack(codes, scales, zeros)
    for found, given in zip(unpack(packed), (codes, scales, zeros)):
        assert (found == given).all()
    for wrong, points in (
        (scales.bfloat16(), None),
        (scales.float(), zeros),
    ):  # what the kernels cannot read
        try:
            pack(codes, wrong, points)
            sys.exit("not refused")
        except ValueError:
            pass
    if sys.argv[1:] == ["cuda"]:
        from fast.packed_gemv import gemv

        packed = pack(codes.cuda(), scales.cuda(), zeros.cuda())
        x, bias = (
            torch.randn(1, K, device="cuda").bfloat16(),
            torch.randn(N, device="cuda").bfloat16(),
        )
        w = (codes.double().view(N, C, -1) - zeros[:, :, None]) * scales.double()[:, :, None]
        ref = x.double() @ w.flatten(1).cuda().T + bias.double()
        assert (gemv(x, packed, bias=bias).double() - ref).norm() < 5e-3 * ref.norm()
print(
    *sorted(
        name
        for name in sys.modules
        if name.partition(".")[0]
        in "fast model generate quantize tp speculative gptq llm hub drafts cli".split()
    )
)
