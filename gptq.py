"""
GPTQ (Frantar et al. 2022, arXiv 2210.17323): codes that are chosen column by column, for the inputs
that a calibration text gives. The columns that are not quantized yet make up for each error.

    python quantize.py --checkpoint DIR --gptq --act-order --calibration TEXT --out DIR-gptq

Shapes: as in quantize.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from model import DenseAndMoE, Experts, Transformer, visible
from quantize import (
    CODES,
    Codes,
    QuantizedLinear,
    as_held,
    encode,
    find_layers,
    find_scales,
    group_of,
    in_half,
    join_experts,
    pack,
    plain_layer,
    replace_layers,
    rounded,
    say_once,
)

# Columns whose errors are passed on to the rest at once: arXiv 2210.17323, section 3.3, step 2.
BLOCK = 128
SHRINK = [1 - 0.03 * i for i in range(8)]  # factors of a group's scale, of which the best is taken
CHUNK = 8192  # calibration tokens at a time
FEWEST = 128  # tokens that an expert must have seen; another one is rounded


# A matrix


def inverse_factor(hessian: Tensor) -> Tensor:
    """The upper triangular U with U^T U the inverse of hessian [K, K], which it damps in place.

    L is the Cholesky factor of the matrix with rows and columns reversed; U is the inverse of L,
    reversed again. So no inverse has to be factored. An input that is always 0 has a row of zeros;
    the damping suffices for it.

    More damping than K times the largest number makes any matrix positive definite. So a ValueError
    for a damping that is not finite ends this: the inputs' squares overflow, of which the diagonal
    is a sum."""
    damping = 0.01 * hessian.diagonal().abs().mean().clamp(min=1e-30)
    failed = True
    while failed:
        if not damping.isfinite():
            raise ValueError(
                "the calibration text's activations overflow; dtype=float32 holds more"
            )
        hessian.diagonal().add_(damping)
        L, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
        damping *= 10
        if failed:
            say_once("GPTQ: a Hessian is not positive definite; damped ten times more until it is")
    eye = torch.eye(len(L), device=L.device)
    return torch.linalg.solve_triangular(L, eye, upper=False).flip(0, 1)


def find_best_scales(w: Tensor, codes: Codes, sym: bool, costs: Tensor):
    """w [N, G] -> scale, by as_held(), and zero [N], with the least sum of squared errors times
    costs [G].

    Without costs, smaller scales made the perplexity worse."""
    widest, zero = find_scales(w, codes, sym)
    scales = as_held(widest * widest.new_tensor(SHRINK)[:, None, None])  # [8, N, 1]
    losses = []
    for scale in scales:
        error = (encode(w, scale, zero, codes) - zero) * scale - w
        losses.append((error.square() * costs).sum(-1, keepdim=True))
    best = torch.stack(losses).argmin(0, keepdim=True)  # [1, N, 1]
    return scales.gather(0, best).flatten(), zero.flatten()


def gptq(
    w: Tensor,
    hessian: Tensor,
    codes: Codes,
    group_size: int,
    sym: bool,
    act_order: bool,
    drift: Tensor | None = None,
):
    """arXiv 2210.17323, algorithm 1. w [N, K], hessian X X^T [K, K], fp32, of inputs X -> q [N, K],
    uint8, scales [N, C] as round_to_nearest() gives them, zeros [N, C] or None, g_idx [K] or None,
    loss.

    drift: (Y - X) X^T [K, K], where Y are the inputs of the model before it is quantized. The
    weights are first moved so that their outputs for X come nearest to those for Y: by W drift (X
    X^T)^-1 (after GPTAQ, arXiv 2504.02692).

    A group's scales are found when the group begins: from weights that make up for the errors so
    far, and with what an error costs once the columns after it make up for it. Act-order takes the
    columns by falling diagonal of the Hessian; g_idx then names each input's group. loss: ||(W - Q)
    X||^2 / ||W X||^2, with the damping."""
    K = w.shape[1]
    G = group_of(K, group_size)
    perm = torch.arange(K, device=w.device)
    if act_order:
        perm = hessian.diagonal().argsort(descending=True, stable=True)
    w, hessian = w.float()[:, perm], hessian[perm][:, perm]
    U = inverse_factor(hessian)
    if drift is not None:
        w = w + w @ drift[perm][:, perm] @ U.T @ U
    diagonal = U.diagonal()
    # [K, N], so that a column is contiguous; column by column it turns into the errors.
    rest = w.T.contiguous()
    q, scales, zeros = torch.empty_like(rest, dtype=torch.uint8), [], []
    for begin in range(0, K, G):
        group = slice(begin, begin + G)
        scale, zero = find_best_scales(rest[group].T, codes, sym, diagonal[group] ** -2)
        scales.append(scale)
        zeros.append(zero)
        for start in range(begin, begin + G, BLOCK):
            end = min(start + BLOCK, begin + G)
            for k in range(start, end):
                code = encode(rest[k], scale, zero, codes)
                q[k] = code
                error = (rest[k] - (code - zero) * scale) / diagonal[k]
                rest[k + 1 : end].addr_(U[k, k + 1 : end], error, alpha=-1)
                rest[k] = error
            rest[end:].addmm_(U[start:end, end:].T, rest[start:end], alpha=-1)
    # As W - Q is errors^T U.
    loss = rest.square().sum() / ((w @ hessian) * w).sum().clamp(min=1e-30)
    zeros = None if sym else torch.stack(zeros, dim=1).to(torch.uint8)
    back = perm.argsort()
    g_idx = back // G if act_order else None
    return q[back].T, in_half(torch.stack(scales, dim=1)), zeros, g_idx, loss.item()


# A model


class ExpertList(nn.ModuleList):
    """model.Experts as linear layers, while these are quantized one by one."""

    def forward(self, x: Tensor, experts: Tensor):
        sizes = experts.bincount(minlength=len(self))
        rows = x.split(sizes.tolist())
        return torch.cat([linear(of) for linear, of in zip(self, rows)])


def split_experts(layer: Experts) -> ExpertList:
    biases = [None] * layer.n_expert if layer.bias is None else layer.bias
    return ExpertList(map(plain_layer, layer.weight, biases))


def separate_matrices(model: Transformer, head: bool) -> list[str]:
    """The names of the linear layers to quantize. Each expert becomes one, its number at the end of
    its name."""
    replace_layers(model, Experts, split_experts)
    return find_layers(model, head)


@torch.no_grad()
def gptq_model(
    model: Transformer,
    quantize: str,
    group_size: int,
    sym: bool,
    tokens: Tensor,
    act_order: bool = False,
    head: bool = False,
    progress: bool = False,
):
    """As quantize.round_model(), but by GPTQ, with calibration tokens [S, T]."""
    from tqdm import tqdm

    codes, few = CODES[quantize], 0
    names = separate_matrices(model, head)
    turns = calibrate(model, tokens, head)
    bar = tqdm(turns, "quantizing", len(names), unit="matrix", disable=None if progress else True)
    for name, hessian, drift in bar:
        linear = model.get_submodule(name)
        if hessian is None:
            layer = rounded(linear, codes, group_size, sym)
            few += 1
        else:
            q, scales, zeros, g_idx, loss = gptq(
                linear.weight, hessian, codes, group_size, sym, act_order, drift
            )
            qweight = pack(q, codes.bits)
            layer = QuantizedLinear(qweight, scales, zeros, codes, linear.bias, g_idx)
            bar.set_postfix({name: f"{loss:.1e}"})
        model.set_submodule(name, layer)
    replace_layers(model, ExpertList, join_experts)
    if few:
        say_once(f"rounded: {few} matrices of experts that saw fewer than {FEWEST} tokens")


def calibrate(model: Transformer, tokens: Tensor, head: bool) -> Iterator[tuple]:
    """tokens [S, T] -> each linear layer's name, hessian and drift, in turn. The caller quantizes
    the layer before it asks for the next.

    hessian: of the inputs in the model whose earlier layers are quantized. drift: how far these
    inputs are from those in the original model. Both are None for an expert that few tokens
    reach."""
    T = tokens.shape[1]
    model.setup(T)
    # [2, S, T, D]: the hidden states so far of the quantized model, and of the original; then
    # chunks of both.
    states = model.embedded(tokens.expand(2, -1, -1))
    size = max(1, CHUNK // T)
    chunks = states.split(size, dim=1)
    own = None  # [S, T, n_layer, P]: a function of the tokens, and no part of it is quantized
    if model.ple is not None:
        own = model.ple(tokens, states[1])
    replay_shared(model)

    def add(outputs: Iterable[tuple[Tensor, Tensor]], post_norm: nn.Module):
        for both, y in zip(chunks, outputs):
            both.add_(post_norm(torch.stack(y)), alpha=model.config.residual_scale)

    positions = torch.arange(T, device=tokens.device)[None]
    turns = {table.rope: table(positions) for table in model.ropes}
    for i, layer in enumerate(model.layers):
        name = f"layers.{i}"
        mask = visible(model.slots, positions, layer.config.window)
        where = positions, *turns[layer.config.rope], mask, model.rows

        def attend(qkv: Tensor, _):
            return layer.attn.attend(qkv, *where)

        def mix(qkvz: Tensor, x: Tensor):
            return layer.attn.mix(qkvz, layer.attn.w_gates(x), *where)

        first, between = ("w_in", mix) if layer.config.delta else ("wqkv", attend)
        middle = None
        if latent := layer.config.latent:
            first = "w_in"
            middle = (f"{name}.attn.wq", layer.attn.queries_latent) if latent.q_dim else None
        names = f"{name}.attn.{first}", f"{name}.attn.wo"
        how = between, layer.attn_norm, chunks
        outputs = yield from calibrate_pair(model, names, *how, middle=middle)
        add(outputs, layer.attn_post_norm)
        ffn, norm = layer.ffn, layer.ffn_norm
        if isinstance(ffn, DenseAndMoE):
            total = yield from calibrate_both(model, f"{name}.ffn", states, chunks)
            outputs = zip((ffn(x) for x, _ in chunks), total.split(size))
        elif layer.config.moe:
            total = yield from calibrate_experts(model, f"{name}.ffn", norm, states)
            if ffn.shared is not None:
                shared = yield from calibrate_ffn(model, f"{name}.ffn.shared", norm, chunks)
                for (_, x), part, (_, y) in zip(chunks, total.split(size), shared):
                    part += ffn.shared_weight(norm(x)) * y
            outputs = zip((ffn(norm(x)) for x, _ in chunks), total.split(size))
        else:
            outputs = yield from calibrate_ffn(model, f"{name}.ffn", norm, chunks)
        add(outputs, layer.ffn_post_norm)
        parts = [None] * len(chunks) if own is None else own[:, :, i].split(size)
        for both, part in zip(chunks, parts):
            both.copy_(layer.end(both, part))
    if head:
        yield "head", *correlations(map(model.norm, chunks))


def calibrate_ffn(model: Transformer, name: str, norm: nn.Module, chunks: Sequence[Tensor]):
    """calibrate_pair() of a FeedForward."""
    gate = model.get_submodule(name).gate
    names = f"{name}.w_gate_up", f"{name}.w_down"
    return (yield from calibrate_pair(model, names, lambda y, _: gate(y), norm, chunks))


class Kept(nn.Module):
    """In a KVCache's place, of a layer whose keys and values later ones read: those of all chunks,
    in the order in which calibrate_pair() has them, the original's and then the quantized model's.
    Each later layer asks in the same order."""

    def __init__(self, made: list | None = None):
        super().__init__()
        self.made, self.at = [] if made is None else made, 0

    def write(self, k, v, rows, positions):
        self.made.append((k.transpose(1, 2), v.transpose(1, 2)))

    def read(self, rows, n: int):
        self.at += 1
        return self.made[self.at - 1]


def replay_shared(model: Transformer) -> None:
    for layer in model.layers:
        source = layer.config.kv_of
        if source is not None:
            holder = model.layers[source].attn
            if not isinstance(holder.cache, Kept):
                holder.cache = Kept()
            layer.attn.cache = Kept(holder.cache.made)


def calibrate_both(model: Transformer, name: str, states: Tensor, chunks: Sequence[Tensor]):
    """calibrate_experts() of a DenseAndMoE."""
    ffn = model.get_submodule(name)
    dense = yield from calibrate_ffn(model, f"{name}.dense", ffn.dense_norm, chunks)
    dense = torch.cat([ffn.dense_post_norm(y) for _, y in dense])  # the original's
    total = yield from calibrate_experts(model, f"{name}.moe", ffn.moe_norm, states, states[1])
    return dense + ffn.moe_post_norm(total)


def calibrate_pair(
    model: Transformer,
    names: tuple[str, str],
    between: Callable,
    norm: nn.Module,
    chunks: Sequence[Tensor],
    few: bool = False,
    middle: tuple[str, Callable] | None = None,
):
    """Two matrices, one behind the other, and the function between them, of what the first one
    gives and what it was given. middle: a matrix inside of this function, and what makes its inputs
    of what the first one gives. Returns what they give for each of chunks [2, ..., D], normed: for
    the states and, with the original matrices, for the original states."""
    first, second = names
    layer = model.get_submodule  # the caller puts quantized ones into the model

    def inputs_of_second(x: Tensor) -> Tensor:
        x = norm(x)
        return between(layer(first)(x), x)

    def inputs_of_middle(x: Tensor) -> Tensor:
        return middle[1](layer(first)(norm(x)))

    wanted = [inputs_of_second(y) for _, y in chunks]
    outputs = [layer(second)(y) for y in wanted]
    wanted_in_middle = [inputs_of_middle(y) for _, y in chunks] if middle else []
    yield first, *correlations(map(norm, chunks), few)
    if middle:
        inputs = (inputs_of_middle(x) for x, _ in chunks)
        yield middle[0], *correlations(zip(inputs, wanted_in_middle), few)
    inputs = [inputs_of_second(x) for x, _ in chunks]
    yield second, *correlations(zip(inputs, wanted), few)
    return zip(map(layer(second), inputs), outputs)


def calibrate_experts(
    model: Transformer,
    name: str,
    norm: nn.Module,
    states: Tensor,
    routed: Tensor | None = None,
):
    """The pairs of a mixture of experts, each for the rows that the original routes there. Returns
    what the original gives for its states, of states [2, S, T, D]. routed [S, T, D]: what its
    router reads; None: the normed states."""
    moe = model.get_submodule(name)
    rows = states.flatten(1, 2)
    weights, experts = moe.route(norm(rows[1]) if routed is None else routed.flatten(0, 1))
    total = torch.zeros_like(rows[1])
    for x in range(moe.moe.n_expert):
        chosen = experts == x
        own = chosen.any(1).nonzero()[:, 0]
        names = f"{name}.w_gate_up.{x}", f"{name}.w_down.{x}"
        few = len(own) < FEWEST
        [(_, output)] = yield from calibrate_pair(
            model, names, lambda y, _: moe.gate(y), norm, [rows[:, own]], few
        )
        total[own] += (weights * chosen).sum(1, keepdim=True)[own] * output
    return total.view_as(states[1])


def correlations(pairs: Iterable[Iterable[Tensor]], few: bool = False):
    """X X^T and (Y - X) X^T [K, K], fp32, of inputs X and Y that come in chunks [S, T, K]. few:
    None for both."""
    if few:
        return None, None
    hessian = drift = 0
    for pair in pairs:
        x, y = (of.flatten(0, -2).float() for of in pair)
        hessian += x.T @ x
        drift += (y - x).T @ x
    return hessian, drift
