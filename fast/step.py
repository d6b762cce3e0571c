"""
All layers of a decode step of one row in one launch (step.cu), on a GPU of compute capability 9.0
and up.

Launches leave a gap between one product and the next, in which the memory is idle: 3.5 to 4.3 us of
the 6 to 20 us that a product of a small model or of a mixture takes. Here one program a
multiprocessor runs through all layers. Its last warp, the producer, copies the weights of one
product after the other into a ring in shared memory, before their inputs are there; so while the
other warps wait for these, the next weights come in:

    producer       Qkv ....  cache ....  Wo ....  (waits)      Up .......  Down ....  Qkv ....
    other warps    Qkv       attention   Wo       router       Up          Down

Shapes: D the model's width, H query heads and K kv heads of E elements, L positions of the cache, X
experts. Terms:

    program a thread block of the launch; each multiprocessor has one
    rank    a process with a GPU of its own, where several share a model (tp.py)
    tile    16 rows of a weight, or 8; a product's programs have its tiles by turns
    unit    the inputs of a tile that a warp multiplies at once, two blocks of layout.py: 64 in
            16 bits (128 of a tile of 8 rows), 128 in int8 and FP8, 256 in int4
    slot    16 KB of weights or of the cache, and the scales beside them, on their way through the
            ring. They are numbered from the launch on, and number n has place n % STAGES. A slot of
            the cache, as model.py calls it, is a position here
    task    what one program does at once of attention, or of a recurrent layer's mixer. There a tile
            is 16 positions
    word    64 bits that programs exchange, see below

Of a mixture the producer waits once a layer: for the experts, whose weights it then copies. A
router is no product of its own, as that would take one more exchange: who has rows of the stream
multiplies them by the router's weights, and adds fixed-point numbers to words that each expert has,
whose sum does not depend on the order. Each program then ranks the experts by itself: a warp those
of 32, and then those that may be chosen.

Where a norm stands after a branch (Gemma 3), what the branch makes is added to the residual stream
by who reads it: programs with tiles of Qkv or Up have all of the stream, and norm the branch's words
themselves.

What one program computes the others read as words of 64 bits, 32 of numbers and 32 of a tag, which
is another one in each layer and step: a word tells by itself that it is there, without a fence, a
barrier of all programs or anything to clear. A layer later the word is written again. By then all
that read it are done, as its writer has meanwhile read words which each of these wrote after its
reading. Step by step, attended for each kind of layer:

    words          who writes them                    what these have read before
    qkv            programs with tiles of Qkv         ends, all of it
    split_sums     those with a split of a head       qkv, the head's
    attended       those with a task of attention     qkv, the head's
                     or, of several splits, all       split_sums, the head's, and qkv
                   those with a task of a mixer       ends, all of it, and qkv, the head's
    middle, logits programs with tiles of Wo          attended, all of it
    gated          programs with tiles of Up          middle, all of it, and logits
    ends           programs with tiles of Down        gated, all of it
    rank_words     other ranks' programs with         of Wo: attended, all of it
                     tiles of Wo or Down              of Down: gated, all of it

So a program that has not read the last layer's qkv, say, has not written its part of attended,
without which there is no middle, and so on to the next qkv. A new kind of word must be on this
chain, and a program may read words of a layer only if it writes some of that layer later. Those of
logits are sums, which are added to: a layer's are what they grow by.

Nothing hangs, unless another rank stops: the launch is cooperative, so that all programs run; each
wait is for something earlier in an order that is the same in all of them; and the ring has more
slots than warps hold while they wait for one more.

A product's rows come in tiles of 16 (in 16 bits mostly of 8, see Sizes in step_base.cu), and a program
has every PROGRAMS-th tile. Slots of the ring hold eight units of a tile (packed_gemv.py draws one),
and a squad of eight warps takes a slot, each a unit. All slots of a tile come before the next tile's:
16-bit rows are read faster so. Where a row has one slot, the squads have tiles of their own. Where
it has no more slots than squads, a warp's part of x stays in its registers.

Attention: a program has a kv head and 64 columns of its values. Of a text of more than 256
positions it has some of them, a split, and, where E is not 64, 128 columns: it reads all of each
key, which otherwise more programs would. Keys and values come through the ring, too, 4,096 / E
positions a slot, before the query is there: a warp's own loads, asked for as early, would hold up
the words that it asks for after them. Where several programs share a head's positions, their sums,
largest scores and totals are words, which all programs put together, each 32 elements of a head.

A recurrent layer has a mixer in attention's place, the gated delta rule (delta.py), with a task for
each value head: step_delta.cu. The state comes through the ring, as do the keys and corrections of
the block's earlier tokens. Half of the warps make query, key and value of the channels, while the
others multiply the stream by the weights of the gates.

16-bit weights and the cache are rows of a tensor in memory. A copy takes a box of them by a tensor
map, which has rows of 128 bytes; where these lie in a slot, all banks of shared memory are read at
once (part_of() in step_base.cu).

A barrier's parity tells one use of a place in the ring from the next, not from the one after that.
A squad's next slot of a product is at most three after its last, and the ring is long enough for
that (STAGES in step_base.cu). A warp of attention takes up to every eighth slot, and asks first which
slot a place has (Shared::held).

Where ranks of one host share a model, each runs this step with its share of the weights. Of Wo and
Down it has some of the inputs. So a program sends what its tiles give to the programs of the other
ranks that have the same tiles, as words in the memory of their GPUs. It adds what they send to it,
in the ranks' order. From there on all is as if a rank had all inputs (sum_of_ranks() in
step_base.cu).

BENCHMARKS.md has a layer's times, with launches and in one launch. A mixture's products are small,
and gain most. Dense layers gain less the larger they are, as their bytes take far longer than the
gaps between launches: why_slower() lets through sizes and formats of which some model was measured,
and gained at least in short texts. Mixtral's experts are too wide: their inputs leave no room for a
ring (stages()).

BENCHMARKS.md says, too, what a layer saves if a part is left out. Where the time of a layer of
Qwen3-30B-A3B in int4 went in an earlier version of 21.4 us, by time stamps of a warp of several
programs, in us: Qkv 2.2; attention, in eight programs, 3.7, of which 1.1
for its input, 1.5 for 16 positions of the cache a warp and 0.8 to join the warps; Wo 2.6; the router's
sums 1.0, and to wait for all of them and rank 2.4; Up and Down 4.5 each. What was learned on the way:

- Of the 22.8 us of Qwen3.5-35B-A3B, of which three layers in four have a mixer, 2.8 are what the mixers
  compute: so much goes if they pass on words alone. They took 4.0 when half of the warps waited while
  the others made the gates, and one warp added the corrections. With 28 earlier tokens in the block,
  at 220 tokens, a layer takes 0.5 us more than with 8, at 200.
- The choice of 8 of 256 experts took 3.4 us more when it counted for each how many of all 256 come
  before it, and a lane loaded the router's rows one after the other.
- Fewer copies in flight make words arrive sooner: 7B in int4 took 37.4 us with four slots on their way
  to each program, 33.8 with two, 32.9 with one while it waits for words and three while it
  multiplies. Qwen3-30B-A3B in bf16, which has more bytes, took 37.8 so, and 36.6 with two and three.
- The order of a product's slots: when a squad took one slot of all tiles and then the next, so that
  its part of x stayed in registers, 7B took 103.7 us in bf16 in place of 100.2, and 55.3 in place of
  54.1 in int8 (one call; int4 32.5 and 32.3). More copies in flight changed 1% at most.
- Tiles of 8 rows, where weights have 16 bits: of Wo and Down, 2,560 rows are 320 tiles for 132
  programs, 2 or 3 each, in place of 160, 1 or 2. So Qwen3.5-4B took 62.4 us in place of 66.5,
  Gemma-3-4B 58.6 in place of 61.2, 7B 99.5 in place of 100.5. Of Up they cost as much as they gave:
  1B 34.4 in place of 33.2, 8B 107.4 in place of 108.0, a mixture (Qwen3-30B-A3B) 36.3 in place of
  35.7. To let programs begin a tile at different slots changed nothing.
- The output head has a launch. As one more product here, whose sums were finished eight tiles at a
  time, it made a step of Qwen3-30B-A3B in int4 take 1,043 us in place of 1,036: a large matrix is read
  faster with more copies in flight than suit the layers.
- Act-order has launches (Operation.unsupported()): a lane would ask for each input's word by itself,
  all over the row. 7B in int4 took 92.6 us so, and 32.4 in order.
- Several rows have launches. Each program reads all inputs: with words of three rows more 7B in int4
  takes 39.0 us in place of 32.5, and that alone. Four rows' inputs of Down in fp16, 88 KB, and their
  sums leave the ring fewer slots than LEAST_STAGES. With launches a layer takes about 52 us, by
  BENCHMARKS.md's tokens/s of four rows.
- A layer's instructions are 100 KB, and come anew in each layer. An H200's multiprocessor runs a
  straight line of up to 32 KB at one cycle an instruction, up to 128 KB at 2.3, beyond at 5.9. So
  what runs once a layer costs by its length, most of all where all 16 warps run it.
- To ask for words less often, or for one of them first, changes nothing. To run through the same
  instructions once while words are awaited costs 2.5 us a layer.
- A warp that waits for its units' words one after the other waits as often as it has units: 7B in
  bf16, where it has up to 11, took 110.4 us, and 107 with two or four at a time. All that it asks
  for should stay in registers: numbers that went through shared memory cost 4 us more.

The step is compiled by NVRTC for one model: source() writes its products' sizes and formats as
structs in front of step.cu, and addresses, which differ from layer to layer, are FIELDS numbers in
memory, one a lane, which a warp loads a layer ahead. Weights and caches must stay where they are.
"""

import ctypes
import functools
import math
import sys
from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, library, nn

from fast import nvrtc
from fast.collectives import ON_CPU, memory_of_ranks
from fast.delta import TOKENS
from fast.experts import FusedMoE
from fast.layout import Packed
from fast.packed_gemv import Experts, Plain, group_in_kernel, has_gemv, row_blocks, source_of
from fast.packed_linear import PackedLinear
from model import BLOCK, RING, RMSNorm
from tp import RowParallelLinear, on_all_ranks

WARPS = 16  # of a program, beside the producer
# Slots that may be on their way to a program while it waits for words and while it multiplies: of
# dense models in codes, of mixtures in codes, whose products are small, and of 16-bit weights.
IN_FLIGHT, IN_FLIGHT_SMALL, IN_FLIGHT_16_BITS = (1, 3), (2, 2), (2, 3)
# How often a warp asks for a word before the kernel traps: that takes a few seconds. Ranks that share
# a step wait without an end, see give_up_after() in step_base.cu.
TRIES = 1 << 21
# Limits of why_slower(). Up to here one launch was about as fast as launches, or faster; beyond, it
# was slower or nobody measured it. Positions of a cache of 16 bits and of one in int8, of dense
# models and of mixtures:
LONGEST, LONGEST_OF_EXPERTS = (33_000, 8_000), (132_000, 33_000)
# Bytes of a dense layer's weights, of ranks each one's, by their kind: up to 13B in int4, 4B in int8
# (7B was as fast, 8B 3% slower) and in FP8, 8B in 16 bits.
LARGEST_DENSE = {"int4": 168 << 20, "int8": 128 << 20, "fp8": 128 << 20, "16-bit": 420 << 20}
MOST_RANKS = 2
LEAST_STAGES = 4 + IN_FLIGHT[1]  # of the ring, for two squads of eight warps
NO_INT8_CACHE = (
    "an int8 cache with heads of 64, in fp16, or with a length that is no multiple of four"
)
LARGEST_SPLITS, COPIES = 32, 4  # of step_base.cu and step_router.cu
FIELDS = 32  # of a layer
PER_PRODUCT = 4


class Operation(NamedTuple):
    """A product of a layer: the weight [N, K], K inputs, and what stands around it. post_norm: the
    weight of a norm of what comes out, before it is added to the residual stream. eight_rows: whether
    a tile has 8 rows, and a unit twice as many inputs (see Sizes in step_base.cu)."""

    name: str
    w: Packed | Plain
    norm: Tensor | None = None
    post_norm: Tensor | None = None
    bias: Tensor | None = None
    residual: bool = False
    experts: int = 0  # how many a row takes
    row_parallel: bool = False  # each rank has some of the inputs
    eight_rows: bool = False

    def constants(self) -> tuple:
        """What step.cu is compiled for."""
        w = self.w
        scales = w.scales_and_zeros
        # group_in_kernel() asks only whether there are any.
        some = Experts(torch.empty(self.experts + 1), None) if self.experts else None
        return tuple(
            dict(
                BITS=w.bits,
                E2M1=w.kind == "mxfp4",
                E4M3=w.kind == "fp8",
                K=w.K,
                N=w.N // 2 if w.gated else w.N,
                GROUP=group_in_kernel(w, some),
                PARTS=w.parts,
                FLOAT_SCALES=scales is not None and scales.dtype == torch.float32,
                SHARED_ROWS=shares_scales(w),
                EIGHT_ROWS=self.eight_rows,
                GATED=w.gated,
                EXPERTS=self.experts,
                NORM=self.norm is not None,
                FLOAT_NORM=self.norm is not None and self.norm.dtype == torch.float32,
                BIAS=self.bias is not None,
                RESIDUAL=self.residual and self.post_norm is None,
                ROW_PARALLEL=self.row_parallel,
            ).items()
        )

    @property
    def unit_inputs(self) -> int:
        return 2 * self.w.block * (2 if self.eight_rows else 1)

    @property
    def row_units(self) -> int:
        """Units of a row of the weight."""
        return math.ceil(self.w.K / self.unit_inputs)

    def struct(self) -> str:
        return struct(self.name, self.constants())

    def unsupported(self) -> str | None:
        """Why step.cu has no such product."""
        w = self.w
        if w.kind not in ("16-bit", "int8", "fp8", "int4", "mxfp4"):
            return f"{w.kind} weights"
        if w.perm is not None:
            return "act-order"
        if self.post_norm is not None and self.experts:
            return "a norm behind a mixture"
        if self.name == "RouterOp":
            return None if w.K % 8 == 0 else f"a router of {w.K} inputs"
        if not w.fits_kernels or w.K % 8 or w.N % 16 and w.gated or w.N % 2:
            return f"a product of {w.N} x {w.K} in {w.kind}"
        if w.bits == 16 and w.K % 64:
            return f"16-bit weights of {w.K} inputs"
        # Scales come two by two, each of a unit's inputs.
        if shares_scales(w) and (w.group_size != 2 * w.block or w.K % (4 * w.block)):
            return f"scales that rows share, of {w.group_size} of {w.K} inputs"
        return None


def shares_scales(w: Packed | Plain) -> bool:
    """Whether 8 rows of a tile have one scale."""
    return w.scales_and_zeros is not None and w.scales_and_zeros.shape[2] == 2


def struct(name: str, constants: Iterable[tuple[str, int]]) -> str:
    fields = ", ".join(f"{field} = {int(value)}" for field, value in constants)
    return f"struct {name} {{ static constexpr int {fields}; }};"


def weight_of(layer: nn.Module, gated: int = 0) -> tuple[Packed | Plain, Tensor | None] | None:
    if isinstance(layer, RowParallelLinear):
        layer = layer.linear
    if type(layer) is nn.Linear:
        return Plain(layer.weight, gated), layer.bias
    return (layer.packed, layer.bias) if isinstance(layer, PackedLinear) else None


def operations(layer: nn.Module) -> list[Operation] | str:
    """Those of a decoder.FusedBlock, or why there are none."""
    attention, feed_forward = layer.attention, layer.feed_forward
    if not (attention.fused or attention.recurrent) or type(attention).__name__ != "AttentionHalf":
        return "a layer without step.cu's attention"
    halves = attention, feed_forward
    for half in halves:
        if type(half.norm) is not RMSNorm:
            return "no norm before a branch"
        if type(half.post_norm) is nn.Identity:
            continue
        if type(half.post_norm) is not RMSNorm or half.post_norm.eps != half.before["eps"]:
            return "a norm behind a branch of another kind"
    if feed_forward.layer_scale is not None or layer.block.ple is not None:
        return "a layer's own scale or embedding"
    norms = [half.norm.weight for half in halves]
    post_norms = [getattr(half.post_norm, "weight", None) for half in halves]
    if len({None if weight is None else weight.dtype for weight in post_norms}) > 1:
        return "a norm behind one branch alone"
    if post_norms[0] is not None and post_norms[0].dtype != norms[0].dtype:
        return "norms of two types"
    if attention.recurrent:
        mixer = attention.attn.mixer
        first, out = mixer.w_in, mixer.wo
    else:
        attn = attention.attn.attn
        first, out = attn.wqkv, attn.wo
    found, row_parallel = [weight_of(first), weight_of(out)], isinstance(out, RowParallelLinear)
    router = None
    if isinstance(feed_forward.ffn, FusedMoE):
        part = feed_forward.ffn
        how, moe = part.how, part.moe
        n = how.n + (how.shared > 0)
        if how.correction is not None or how.norm is not None:
            return "a router that is no softmax of its logits"
        of_others = how.bias is not None and how.shared  # its logit has no bias
        if how.expert_scale is not None or of_others or n > 32 or max(how.weight.shape) > 16_000:
            return "a router of another kind"
        router = Operation("RouterOp", Plain(how.weight), norms[1], bias=how.bias)
        found += [
            (part.weight(moe.w_gate_up, part.number), moe.w_gate_up.bias),
            (part.weight(moe.w_down, 0), moe.w_down.bias),
        ]
    elif feed_forward.fused and not feed_forward.both:
        part = feed_forward.ffn
        gated = part.number
        found += [weight_of(part.ffn.w_gate_up, gated), weight_of(part.ffn.w_down)]
        n = 0
    else:
        return "a feed-forward part of another kind"
    if None in found:
        return "products of another kind"
    (qkv, of_qkv), (wo, of_wo), (up, of_up), (down, of_down) = found
    # Of Wo's and Down's tiles, which have the same rows, a program keeps the residual stream.
    eight_rows = router is None and wo.bits == down.bits == 16
    to_stream = dict(residual=True, row_parallel=row_parallel, eight_rows=eight_rows)
    name = "In" if attention.recurrent else "Qkv"
    return [
        Operation(name, qkv, norms[0], bias=of_qkv, eight_rows=qkv.bits == 16),
        Operation("Wo", wo, post_norm=post_norms[0], bias=of_wo, **to_stream),
        *([router] if router else []),
        Operation("Up", up, norms[1], bias=of_up, experts=n),
        Operation("Down", down, post_norm=post_norms[1], bias=of_down, experts=n, **to_stream),
    ]


def bytes_of(w: Packed | Plain) -> int:
    return sum(t.nbytes for t in (w.qweight, w.scales_and_zeros) if t is not None)


def why_launches(decoder: nn.Module) -> str | None:
    """Why the layers of a decoder.FusedDecoder take launches of their own; None: they need not."""
    return unsupported(decoder) or why_slower(decoder)


def why_slower(decoder: nn.Module) -> str | None:
    """Why layers that step.cu can run keep their launches: because these are faster, at least in
    long texts, or because nobody timed one launch. None: nothing speaks against it."""
    first = decoder.layers[0]
    weights = [operation.w for operation in operations(first)]
    if any(w.kind == "mxfp4" for w in weights):
        return "mxfp4 weights"
    experts = first.feed_forward.experts
    shared = any(operation.row_parallel for operation in operations(first))
    if shared and dist.get_world_size() > MOST_RANKS:
        return f"more than {MOST_RANKS} ranks"
    kind = min((w.kind for w in weights), key=LARGEST_DENSE.get)
    if not experts and sum(map(bytes_of, weights)) > LARGEST_DENSE[kind]:
        return f"a dense layer of more than {LARGEST_DENSE[kind] >> 20} MiB with {kind} weights"
    halves = [layer.attention for layer in decoder.layers if layer.attention.fused]
    int8 = halves[0].attn.cache.k_scale is not None
    longest = (LONGEST_OF_EXPERTS if experts else LONGEST)[int8]
    if max(half.attn.cache.k.shape[2] for half in halves) > longest:
        return f"{'an int8' if int8 else 'a'} cache of more than {longest:,} slots"
    return None


def unsupported(decoder: nn.Module) -> str | None:
    """What step.cu has no operation for."""
    model = decoder.model
    if model.embed.weight.dtype not in (torch.bfloat16, torch.float16):
        return f"numbers of {8 * model.embed.weight.dtype.itemsize} bits"
    seen = {}

    def differs(**values) -> bool:
        """Whether another layer has said something else of the same."""
        return any(seen.setdefault(name, value) != value for name, value in values.items())

    for layer in decoder.layers:
        found = operations(layer)
        if isinstance(found, str):
            return found
        for operation in found:
            if reason := operation.unsupported():
                return reason
        recurrent, part = layer.attention.recurrent, layer.feed_forward
        mixer = layer.attention.attn
        if (
            reason := unsupported_of_recurrent(mixer)
            if recurrent
            else unsupported_of_attention(mixer)
        ):
            return reason
        moe = part.ffn if part.experts else None
        if (
            differs(**{operation.name: operation.constants() for operation in found})
            or differs(**(of_recurrent(mixer) if recurrent else of_attention(mixer)))
            or differs(
                eps=layer.attention.before["eps"],
                experts=moe and (moe.how[2:6], moe.moe.moe.clamp),
                post_norms=[operation.post_norm is None for operation in found],
            )
            or differs(eps=part.before["eps"])
        ):
            return "layers that differ"
    if "Qkv" not in seen:
        return "no attention"
    if "In" in seen:
        if not all(seen["post_norms"]):
            return "norms behind branches, and recurrent layers"
        # What leaves a layer is in the order in which the next one's first product reads it.
        first = [dict(seen[name]) for name in ("In", "Qkv")]
        if differs_in(*first, "BITS", "E2M1", "K", "NORM", "FLOAT_NORM"):
            return "layers whose first products differ"
    return "hidden states that a draft reads" if model.places else None


def differs_in(a: dict, b: dict, *names: str) -> bool:
    return any(a[name] != b[name] for name in names)


def unsupported_of_attention(fused: nn.Module) -> str | None:
    """unsupported() of a decoder.FusedAttention."""
    attn, rope, cache = fused.attn, fused.attn.rope, fused.cache
    turned = 2 * len(rope.frequencies)
    if fused.norm_values or len(attn.sizes) != 3 or rope.q_growth:
        return "shared or normed values, or queries that grow"
    if attn.head_dim not in (64, 128, 256) or turned % (attn.head_dim // 16):
        return f"heads of {attn.head_dim} of which {turned} turn"
    if attn.sizes[0] > 8 * attn.sizes[1]:
        return f"{attn.sizes[0] // attn.sizes[1]} queries of a key"
    # Of int8 a box has 128 columns, and copied scales begin and end at multiples of four. A value's
    # scale multiplies a share, which fp16 might not hold.
    int8 = cache.k_scale is not None
    if int8 != (cache.v_scale is not None):
        return "keys or values alone in int8"
    if int8 and (attn.head_dim < 128 or cache.dtype != torch.bfloat16 or cache.k.shape[2] % 4):
        return NO_INT8_CACHE
    if cache.k.shape != cache.v.shape:
        return "values of another size than keys"
    norm = attn.q_norm
    if type(norm) is not nn.Identity and (
        type(norm) is not RMSNorm or len(norm.weight) != attn.head_dim
    ):
        return "a norm of all heads"
    return None


def of_attention(fused: nn.Module) -> dict:
    """What is the same in all layers with attention. Where nothing turns, a table says so."""
    attn, norm = fused.attn, getattr(fused.attn.q_norm, "weight", None)
    turned = 2 * len(attn.rope.frequencies)
    return dict(
        attention=(attn.sizes, attn.head_dim, attn.scale, attn.sinks is None, fused.gated),
        int8=fused.cache.k_scale is not None,
        norm_of_heads=None if norm is None else norm.dtype,
        eps_of_heads=fused.eps,
    ) | (dict(turned=turned) if turned else {})


def unsupported_of_recurrent(fused: nn.Module) -> str | None:
    """unsupported() of a delta.FusedDelta."""
    mixer, cache = fused.mixer, fused.cache
    delta, dtype = mixer.delta, cache.inputs.dtype
    if (delta.key_dim, delta.value_dim) != (128, 128):
        return f"a state of {delta.key_dim} x {delta.value_dim}"
    if delta.width < 2:
        return "a convolution over one token"
    of_dtype = mixer.filter, mixer.w_gates.weight
    exact = mixer.log_a, mixer.dt_bias, cache.states
    if (
        {tensor.dtype for tensor in of_dtype} != {dtype}
        or {tensor.dtype for tensor in exact} != {torch.float32}
        or mixer.norm.dtype not in (dtype, torch.float32)
    ):
        return "a mixer of other types"
    return None


def of_recurrent(fused: nn.Module) -> dict:
    """What is the same in all recurrent layers, and an eps that attention's norms of heads have."""
    mixer = fused.mixer
    return dict(recurrent=(mixer.delta, mixer.norm.dtype), eps_of_heads=mixer.eps)


class Step:
    """Of a FusedDecoder for which unsupported() is None: its layers' weights, and what its programs
    share. `programs` of them run at once, each with `memory` bytes of shared memory.

    Where ranks share the model, this is the step of number `rank`. rank_words: of each rank an int64
    [2, R, D] of zeros in its memory, see sum_of_ranks() in step_base.cu; empty on one GPU alone."""

    def __init__(
        self,
        decoder: nn.Module,
        programs: int,
        memory: int,
        warps: int = WARPS,
        rank: int = 0,
        rank_words: tuple[Tensor, ...] = (),
    ):
        self.rank_words, self.ranks = rank_words, max(1, len(rank_words))
        layers, self.weight = decoder.layers, decoder.model.embed.weight
        self.programs, self.memory, self.warps = programs, memory, warps
        device = self.weight.device
        first = layers[0]
        of_layers = [operation for layer in layers for operation in operations(layer)]
        self.operations = list({operation.name: operation for operation in of_layers}.values())
        self.moe = first.feed_forward.ffn if first.feed_forward.experts else None
        halves = [layer.attention for layer in layers]
        self.fused = next(half.attn for half in halves if half.fused)
        self.delta = next((half.attn.mixer for half in halves if half.recurrent), None)
        self.turned = max(2 * len(half.attn.attn.rope.frequencies) for half in halves if half.fused)
        self.eps = first.attention.before["eps"]
        self.post_norms = any(operation.post_norm is not None for operation in self.operations)
        attn = self.fused.attn
        of = {operation.name: operation for operation in self.operations}
        E, H = attn.head_dim, attn.sizes[0] // attn.head_dim
        n = max(operation.experts for operation in self.operations) or 1

        def inputs(operation: Operation) -> int:
            """Words of a row of inputs: whole units."""
            return operation.row_units * operation.unit_inputs // 2

        words = dict(
            qkv=max(of[name].w.N for name in ("Qkv", "In") if name in of) // 2,
            split_sums=H * LARGEST_SPLITS * (E + 2),
            attended=inputs(of["Wo"]),
            middle=inputs(of["Up"]),
            logits=2 * COPIES * (len(self.moe.how.weight) + 1) if self.moe else 1,
            gated=n * inputs(of["Down"]),
            ends=inputs(of["Qkv"]),
        )
        self.words = [
            torch.zeros(size, dtype=torch.int64, device=device) for size in words.values()
        ]
        self.started = torch.zeros(1, dtype=torch.int64, device=device)
        # The kernel's `rank_words`: the address of each rank's words, then this rank's number.
        self.places = torch.tensor([*map(address, rank_words or [None]), rank], device=device)
        maps = [self.maps_of(layer) for layer in layers]
        self.maps = torch.tensor(maps, device=device)  # [n_layer, products and 2, 16]
        self.layers = torch.tensor(
            [self.fields(layer, maps) for layer, maps in zip(layers, self.maps)], device=device
        )
        STEPS[self.started.data_ptr()] = self

    def stages(self) -> int:
        """Slots of the ring: what the rest of step.cu's shared memory leaves room for."""
        attn, experts = self.fused.attn, len(self.moe.how.weight) if self.moe else 1
        units, slots, inputs, tiles = [], [], [], []
        for operation in self.operations:
            if operation.name == "RouterOp":
                continue
            w, n = operation.w, operation.experts
            units.append(operation.row_units * (1 if w.gated else max(n, 1)))
            constants = dict(operation.constants())
            terms = constants["NORM"] + constants["FLOAT_NORM"] + 1  # Sizes::TERMS in step_base.cu
            terms *= 1 + operation.eight_rows
            inputs.append(units[-1] * 128 * {16: terms, 8: 4 + 4 * constants["E4M3"], 4: 8}[w.bits])
            group, scales = constants["GROUP"], w.scales_and_zeros
            chunk = scales.shape[2] * w.parts * scales.element_size() if group else 0
            chunks = (8 if shares_scales(w) else 9) if group > w.block else 16
            slots.append(8 * 2048 + chunks * chunk)
            of_row = row_blocks(w) // experts * (n if w.gated else 1) if n else row_blocks(w)
            tiles.append(math.ceil(of_row * (1 + operation.eight_rows) / self.programs))
        E, queries = attn.head_dim, attn.sizes[0] // attn.sizes[1]
        # As struct Shared has it: of a unit sums, scale, offset and squares; of a tile partial and
        # residual; of a warp and query 64 + 4 sums, largest and total; 2,304 for the rest.
        rest = max(inputs) + 76 * max(units) + 64 * max(tiles) * (self.warps + 1)
        attended, mixing = self.warps * queries * 4 * 68, 0
        if self.delta is not None:
            K, V = self.delta.delta.key_dim, self.delta.delta.value_dim
            # Beside these the state's rows make two numbers a column of each so many warps.
            mixing = 4 * (2 * K + 3 * V + self.warps * 64 + 3 * BLOCK + self.warps * 3 + 16)
        rest += max(attended, mixing) + self.warps * queries * 8
        rest += 2 * E * (queries + 2) + 2304 + 8 * (self.ranks + 1) + 12 * (experts + 32)
        if self.moe:
            rest += 8 * math.ceil(experts / 32) * (self.moe.how.n + 3)
        if self.post_norms:
            rest += 2 * self.weight.shape[1] + 4 * max(units)
        return (self.memory - rest) // (math.ceil(max(slots) / 1024) * 1024)

    def maps_of(self, layer: nn.Module) -> list[list[int]]:
        """The tensor maps by which copy_box() copies, [products and 2, 16]: of each product's weight
        [X, N, inputs], zeros if it has no 16 bits; then of the cache's keys and values [kv heads, L,
        E], zeros if the layer is recurrent.

        A box has rows of 128 bytes. A map calls them 64 numbers of 16 bits; of an int8 cache they
        are 128 codes. A box takes

            weight     16 rows of N or, if gated, 8 of both halves (Qkv and In: 8); of each the
                       inputs of 8 units or, of Down of a mixture, of as many as divide 8 and a
                       row's units
            keys       4,096 / E positions, all of E
            values     4,096 / E positions, 128 bytes of E"""
        maps = []
        for operation in operations(layer):
            w = operation.w
            if w.bits < 16 or operation.name == "RouterOp":
                maps.append([0] * 16)
                continue
            halves, N, K = 2 if w.gated else 1, w.N, w.K
            sizes = 64, N // halves, halves, K // 64, w.qweight.shape[:-2].numel()
            strides = 2 * K, N // halves * 2 * K, 128, N * 2 * K
            units = math.gcd(K // 64, 8) if operation.experts and not w.gated else 8
            box = 64, 16 // halves, halves, units, 1
            if operation.eight_rows:
                box = 64, 8, 1, 16, 1
            maps.append(nvrtc.tensor_map(w.qweight, sizes, strides, box))
        if layer.attention.recurrent:
            return [*maps, [0] * 16, [0] * 16]
        cache = layer.attention.attn.cache
        _, K, L, E = cache.k.shape
        rows = 4096 // E  # positions of a box
        row = E * cache.k.itemsize  # bytes of a position; parts: its 128 bytes; head: bytes
        parts, head = row // 128, L * row
        keys = (64, L, parts, K, 1), (row, 128, head, head), (64, rows, parts, 1, 1)
        values = (64, L, 1, K, parts), (row, head, head, 128), (64, rows, 1, 1, 1)
        return [*maps, nvrtc.tensor_map(cache.k, *keys), nvrtc.tensor_map(cache.v, *values)]

    def fields(self, layer: nn.Module, maps: Tensor) -> list[int]:
        """A layer's addresses and numbers, in the order of step.cu's enums. maps: of its
        products, keys and values."""
        places = dict(Qkv=0, In=0, Wo=1, RouterOp=2, Up=3, Down=4)
        found = [0] * FIELDS
        for operation, of_boxes in zip(operations(layer), maps):
            w = operation.w
            codes = of_boxes if w.bits == 16 and operation.name != "RouterOp" else w.qweight
            norm = operation.post_norm if operation.norm is None else operation.norm
            tensors = codes, w.scales_and_zeros, norm, operation.bias
            at = PER_PRODUCT * places[operation.name]
            found[at : at + 4] = map(address, tensors)
        fused = layer.attention.attn
        if layer.attention.recurrent:
            mixer, cache = fused.mixer, fused.cache
            weights = mixer.filter, mixer.log_a, mixer.dt_bias, mixer.norm, mixer.w_gates.weight
            kept = cache.inputs, cache.states, cache.keys, None, None, cache.decays
            found[20:] = map(address, (*weights, *kept, cache.corrections))
            return found
        attn, cache = fused.attn, fused.cache
        norms = [getattr(norm, "weight", None) for norm in (attn.q_norm, attn.k_norm)]
        table = fused.table
        tensors = cache.k, cache.v, *norms, attn.sinks, table.cos, table.sin
        found[20:27] = map(address, tensors)
        found[27] = cache.k.shape[2] << 32 | (fused.window or 0)
        found[28:] = map(address, (*maps[-2:], cache.k_scale, cache.v_scale))
        return found

    def constants(self) -> dict[str, int]:
        """What step.cu is compiled for, beside the products."""
        attn, norm = self.fused.attn, self.fused.attn.q_norm
        norm = getattr(norm, "weight", None)
        heads, kv_heads = (size // attn.head_dim for size in attn.sizes[:2])
        in_codes = IN_FLIGHT_SMALL if self.moe else IN_FLIGHT
        in_flight = IN_FLIGHT_16_BITS if self.operations[0].w.bits == 16 else in_codes
        waiting, streaming = in_flight
        return dict(
            BF16=self.weight.dtype == torch.bfloat16,
            D=self.weight.shape[1],
            LAYERS=len(self.layers),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=attn.head_dim,
            INT8_CACHE=self.fused.cache.k_scale is not None,
            TURNED=self.turned,
            OUTPUT_GATE=self.fused.gated,
            QK_NORM=norm is not None,
            FLOAT_QK_NORM=norm is not None and norm.dtype == torch.float32,
            SINKS=attn.sinks is not None,
            POST_NORMS=self.post_norms,
            CHOSEN=self.moe.how.n if self.moe else 0,
            SHARED=self.moe.how.shared if self.moe else 0,
            RECURRENT=self.delta is not None,
            NORMALIZE=self.moe.how.normalize if self.moe else 0,
            RANKS=self.ranks,
            WARPS=self.warps,
            PROGRAMS=self.programs,
            MEMORY=self.memory,
            IN_FLIGHT=streaming,
            IN_FLIGHT_WAITING=waiting,
            TRIES=TRIES,
        )

    def source(self) -> str:
        """step.cu with its table."""
        lines = [f"#define {name} {int(value)}" for name, value in self.constants().items()]
        structs = [operation.struct() for operation in self.operations]
        if self.delta is not None:
            delta = self.delta.delta
            of_delta = dict(
                KEY_HEADS=delta.n_key_head,
                VALUE_HEADS=delta.n_value_head,
                KEY_DIM=delta.key_dim,
                VALUE_DIM=delta.value_dim,
                TAPS=delta.width,
                BLOCK=BLOCK,
                RING=RING,
                TOKENS=TOKENS,
                FLOAT_NORM=self.delta.norm.dtype == torch.float32,
            )
            structs.append(struct("Delta", of_delta.items()))
        return "\n".join([*lines, *structs, source_of("step")])

    def arguments(self, x: Tensor, positions: Tensor) -> list:
        """step.cu's; the third is what comes out."""
        moe = self.moe
        clamp = moe.moe.moe.clamp if moe else None
        scales = self.fused.attn.scale, moe.how.scale if moe else 1
        numbers = map(float, (self.eps, self.fused.eps, *scales, *(clamp or (0, 0))))
        out = torch.empty_like(x)
        return [x, positions, out, self.layers, self.started, *self.words, self.places, *numbers]

    @functools.cached_property
    def kernel(self) -> ctypes.c_void_p:
        major, minor = torch.cuda.get_device_capability(self.started.device)
        options = nvrtc.options_for(10 * major + minor, {})
        return nvrtc.load(nvrtc.compile_cuda(self.source(), options), "whole_step", self.memory)

    def check(self) -> None:
        """RuntimeError if the kernel does not compile, or a multiprocessor cannot hold a program."""
        nvrtc.check_holds(self.kernel, (self.warps + 1) * 32, self.memory)

    def launch(self, x: Tensor, positions: Tensor) -> Tensor:
        arguments = self.arguments(x, positions)
        threads = (self.warps + 1) * 32
        nvrtc.launch(self.kernel, self.programs, threads, self.memory, arguments, cooperative=True)
        return arguments[2]

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [1, D], what enters the first layer, positions [1, 1] -> what leaves the last [1, D]"""
        return all_layers(x, positions, self.started)


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def compiled(step: Step) -> Step | None:
    """The step, once its kernel is compiled. None, and a line on stderr that says why, where that
    fails, or the GPU cannot hold it."""
    try:
        step.check()
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        print(f"a layer has launches of its own, which is slower: {why}", file=sys.stderr)
        return None
    return step


def step_of(decoder: nn.Module) -> Step | None:
    """The step of this decoder; None where its layers keep their launches. Where ranks share the
    layers, all call this together, and all get a step, compiled here, or none does: in one launch
    they exchange words, with launches other buffers, so that a mix would wait forever."""
    model = decoder.model
    device = model.embed.weight.device
    if device.type != "cuda":
        return None
    of = torch.cuda.get_device_properties(device)
    sizes = of.multi_processor_count, of.shared_memory_per_block_optin
    serves = (of.major, of.minor) >= (9, 0) and has_gemv(device) and not why_launches(decoder)
    if not any(isinstance(part, RowParallelLinear) for part in decoder.modules()):
        return with_ring(Step(decoder, *sizes)) if serves else None
    # With more rows a step would rarely be run, and compiled here for nothing.
    if len(model.rows) > 1 or not on_all_ranks(serves, ON_CPU):
        return None
    shape = 2, dist.get_world_size(), model.config.dim
    rank_words = memory_of_ranks(shape, torch.int64, 0, device)
    if rank_words is None:
        return None
    step = with_ring(Step(decoder, *sizes, rank=dist.get_rank(), rank_words=rank_words))
    step = step and compiled(step)
    if on_all_ranks(step is not None, ON_CPU):
        return step
    if step is not None:
        why = "another rank cannot compile or hold the step"
        print(f"a layer has launches of its own, which is slower: {why}", file=sys.stderr)
    return None


def with_ring(step: Step) -> Step | None:
    """The step, if its ring has room in shared memory."""
    return step if step.stages() >= LEAST_STAGES else None


# torch.compile does not look inside; a step is found by the address of its counter, which changes
# with each step, as do words and caches that are no arguments: so none is left out or moved.
STEPS = WeakValueDictionary()


@library.custom_op("llama_fast::all_layers", mutates_args=("started",))
def all_layers(x: Tensor, positions: Tensor, started: Tensor) -> Tensor:
    return STEPS[started.data_ptr()].launch(x, positions)


@all_layers.register_fake
def _(x, positions, started):
    return torch.empty_like(x)
