"""
Linear layers whose weights are int4 or int8 codes: the packing, the plain twin, and the layer.

A group of weights of one row, G of them along K, shares a scale and a zero point: w = (code - zero) * scale.

Codes are packed into 32-bit words in the order in which a warp's matrix instruction (mma.m16n8k16) takes its left
operand, so that a kernel loads 16 bytes and has, without any exchange between threads, what its registers need. With P =
16 / bits, a block of 16 words holds 32 P codes of a row: word 4t + c has, at bits `shifts(bits)[s, e]`, the code of
k = 8P c + 8 s + 2 t + e.

Shapes: N outputs, K inputs, W = 16 ceil(K / 32 P) words of a row, C groups of a row (K / G).
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def shifts(bits: int) -> Tensor:
    """[P, 2]: where in a word a code lies. A pair's two are 16 bits apart for int4, which saves instructions."""
    s, e = torch.arange(16 // bits)[:, None], torch.arange(2)
    return 4 * s + 16 * e if bits == 4 else 16 * s + 8 * e


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes [N, K], integers below 2 ** bits -> words, int32 [N, W]; what is beyond K holds zeros."""
    block = 512 // bits
    codes = F.pad(codes.int(), (0, -codes.shape[1] % block))
    codes = codes.view(len(codes), -1, 4, 16 // bits, 4, 2).permute(0, 1, 4, 2, 3, 5)  # [N, blocks, t, c, s, e]
    return (codes << shifts(bits).to(codes.device)).sum((-1, -2), dtype=torch.int32).flatten(1)


def unpack(words: Tensor, bits: int, K: int) -> Tensor:
    """The codes [N, K], int32, of words [N, W]."""
    codes = words.view(len(words), -1, 4, 4, 1, 1) >> shifts(bits).to(words.device) & 2 ** bits - 1
    return codes.permute(0, 1, 3, 4, 2, 5).reshape(len(words), -1)[:, :K]


class PackedLinear(nn.Module):
    """nn.Linear with packed weights; groups lie side by side along K, so their size is K / C.

    codes [N, K] below 2 ** bits; scales [N, C]; zeros, integers [N, C], None for 2 ** (bits - 1) everywhere. order [K]:
    the inputs are taken in this order first (GPTQ's act-order); codes come in it."""

    def __init__(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, bias: Tensor | None = None,
                 order: Tensor | None = None):
        super().__init__()
        self.bits, self.in_features, self.out_features = bits, codes.shape[1], codes.shape[0]

        def parameter(tensor: Tensor | None) -> nn.Parameter | None:
            return None if tensor is None else nn.Parameter(tensor.contiguous(), requires_grad=False)

        self.words, self.scales = parameter(pack(codes, bits)), parameter(scales.half())
        self.zeros = parameter(None if zeros is None else zeros.to(torch.int16))
        self.bias, self.order = parameter(bias), parameter(order)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [N, K] that the codes stand for, in the order in which the codes are."""
        codes = unpack(self.words, self.bits, self.in_features).view(self.out_features, self.scales.shape[1], -1)
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros[:, :, None]
        return ((codes - zeros) * self.scales[:, :, None].float()).flatten(1).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        if self.order is not None:
            x = x[..., self.order]
        if torch.compiler.is_compiling() and x.numel() == self.in_features and x.device.type == "cpu":
            return self.one_row(x.flatten()).to(x.dtype).view(*x.shape[:-1], -1)
        return F.linear(x, self.dequantize(x.dtype), self.bias)

    def one_row(self, x: Tensor) -> Tensor:
        """x [K] -> [N], fp32, as products and sums over the words, which torch.compile fuses into one pass over them."""
        P, C = 16 // self.bits, self.scales.shape[1]
        size = 32 * P  # of a block
        word = torch.arange(self.words.shape[1])
        group = (word // 16 * size + word % 4 * 8 * P).div(self.in_features // C, rounding_mode="floor").clamp(max=C - 1)
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros[:, group]
        x = F.pad(x.float(), (0, -len(x) % size)).view(-1, 4, P, 4, 2).permute(2, 4, 0, 3, 1).reshape(P, 2, -1)
        sums = 0
        for s, row in enumerate(shifts(self.bits).tolist()):
            for e, shift in enumerate(row):
                sums = sums + ((self.words >> shift & 2 ** self.bits - 1) - zeros) * x[s, e]
        y = sums.sum(1) * self.scales[:, 0] if C == 1 else (sums * self.scales[:, group]).sum(1)
        return y if self.bias is None else y + self.bias
