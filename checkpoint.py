"""
Reads a checkpoint in Hugging Face layout: config, weights, tokenizer, chat template. Hugging Face's keys and names are
here and in no other file.

    checkpoint = Checkpoint(Path("checkpoints/tiny"))
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    tokenizer = Tokenizer(checkpoint)

Files are read plainly here: nothing is unpickled and no code of a checkpoint runs, but who reads a directory of unknown
origin calls guard.open_checkpoint(), which vets it first and gives a tokenizer that takes typed special tokens as text.
What a user can get wrong is a UserError of one line.

Shapes: as in model.py.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from model import Config, LayerConfig, MoEConfig, Rope, Transformer

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = "BF16 F16 F32 F64"  # safetensors' names of types
VISION = "vision_tower.", "multi_modal_projector."  # of models that also see
# They end a turn, whether or not generation_config.json lists them.
CHAT_ENDS = "<|eot_id|>", "<|im_end|>"
# gpt-oss's answers have parts: <|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>.
PARTS = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"


class UserError(ValueError):
    """A user's mistake: what was wrong, the limit and the remedy, in one line of at most 1,000 characters.

    The message has keywords in backticks, "`top_k`=-1: want 0 or more". str() writes them as Python does, top_k=-1, and
    command_line() as the command line does, --top-k -1."""

    def __init__(self, message: str):
        self.message = message
        super().__init__(one_line(re.sub(r"`(\w+)`", r"\1", message)))

    def command_line(self) -> str:
        message = self.message.replace("`=", "` ")
        return one_line(
            re.sub(r"`(\w+)`", lambda found: "--" + found[1].replace("_", "-"), message)
        )


def one_line(text: str) -> str:
    """What a file holds may be part of the text, so control characters, which a terminal would obey, are escaped."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return line if len(line) <= 1000 else f"{line[:700]} ... {line[-295:]}"


class Checkpoint:
    """A directory, each JSON file of which is read once. weights: weights_of() its config."""

    make_model = Transformer  # of its config, or of that of a rank's part

    def __init__(self, directory: Path):
        self.directory = directory
        self.hf = self.settings(json.loads((directory / "config.json").read_text("utf-8")))
        self.generation = self.read_json("generation_config.json")
        self.index = self.read_json(INDEX)
        self.config = config_from_hf(self.hf)
        self.weights = hf_weights(self.config)

    @staticmethod
    def settings(hf: dict) -> dict:
        """What config.json says."""
        return text_settings(hf)

    def weights_of(self, config: Config):
        return hf_weights(config)

    def counted(self) -> Config:
        """What guard.check_memory() counts. Its vocabulary has logits."""
        return self.config

    def read_json(self, name: str) -> dict:
        """{} where the file is not there."""
        path = self.directory / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def files(self) -> dict[str, "Place"]:
        """Where each tensor of the language model is. Of a model that also sees, the rest is left out."""
        open_shard.cache_clear()  # a file of this name may be another one by now
        paths = {
            name: self.directory / file
            for name, file in (self.index.get("weight_map") or {}).items()
        }
        if not self.index:
            whole = self.directory / WHOLE
            if not whole.exists():
                raise UserError(
                    f"{self.directory}: no {WHOLE}, nor its index; *.bin and *.gguf are not read"
                )
            paths = dict.fromkeys(open_shard(whole).keys(), whole)
        if "vision_config" in self.hf:
            seeing = [name for name in paths if name.removeprefix("model.").startswith(VISION)]
            left_out = f"{len(seeing)} tensors of its vision part are left out"
            print(f"{self.directory}: text only: {left_out}", file=sys.stderr)
            for name in seeing:
                del paths[name]
        return {
            name.replace("language_model.", "", 1): Place(path, name)
            for name, path in paths.items()
        }


class Place(NamedTuple):
    """A tensor in a safetensors file: the name that it has there."""

    path: Path
    name: str


# config.json


OLMO = dict(qk_norm="whole", pre_norm=False, post_norm=True, norm_fp32=True)
FAMILIES = {  # model_type -> the fields of Config that it stands for
    "llama": {},
    "mistral": {},
    "qwen2": dict(qkv_bias=True),
    "qwen3": dict(qk_norm="head"),
    "smollm3": {},
    "phi3": dict(fused_files=True),
    "granite": {},
    "ministral3": {},
    "olmo2": OLMO,
    "olmo3": OLMO,
    "gemma3_text": dict(
        qk_norm="head", post_norm=True, norm_fp32=True, norm_offset=1.0, activation="gelu"
    ),
    "mixtral": dict(expert_files="block_sparse_moe gate w1 w3 w2"),
    "qwen3_moe": dict(qk_norm="head", expert_files="mlp gate gate_proj up_proj down_proj"),
    "gpt_oss": dict(
        qkv_bias=True, o_bias=True, sinks=True, norm_fp32=True, expert_files="mlp router"
    ),
}
DEFAULTS = {  # model_type -> what a missing key stands for, as in transformers
    "smollm3": dict(
        rope_theta=2e6, rms_norm_eps=1e-6, tie_word_embeddings=True, no_rope_layer_interval=4
    ),
    "olmo3": dict(rope_theta=5e5, sliding_window=4096),
    "gemma3_text": dict(
        vocab_size=262208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window=4096,
        query_pre_attn_scalar=256,
        tie_word_embeddings=True,
    ),
    "gpt_oss": dict(
        head_dim=64,
        rope_theta=150000.0,
        rope_scaling=dict(
            rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
        ),
        sliding_window=128,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
    ),
}
SUPPORTED = {  # key -> the values that are read here, first what a missing key stands for
    "model_type": tuple(FAMILIES),
    "hidden_act": ("silu",),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "n_group": (1, None),
    "n_shared_experts": (0, None),
    "shared_expert_intermediate_size": (0, None),
    "routed_scaling_factor": (1,),
}


LACKING = {  # model_type -> what it has that is not here
    "gemma2": "caps of attention scores and logits",
    "gemma3n": "layers that are left out for some tokens",
    "qwen3_5": "recurrent layers",
    "qwen3_next": "recurrent layers",
    "granitemoehybrid": "recurrent layers",
    **dict.fromkeys(
        ("qwen2_moe", "granitemoe", "phimoe", "olmoe", "llama4", "deepseek_v3"),
        "kind of experts",
    ),
}


def check_supported(settings: dict, supported: dict) -> None:
    """ValueError names the key and the value that are not supported."""
    for key, values in supported.items():
        found = settings.get(key, values[0])
        if found not in values:
            lacking = ""
            if key == "model_type" and found in LACKING:
                lacking = f", as its {LACKING[found]} are not here"
            raise ValueError(
                f"{key}={found!r} is not supported{lacking}: want {' or '.join(map(repr, values))}"
            )


def text_settings(hf: dict) -> dict:
    """Those of the language model, where config.json is of a model that also sees, and what missing keys stand for."""
    text = hf.get("text_config") or {}
    kind = text.get("model_type") or hf.get("model_type")
    kind = dict(gemma3="gemma3_text", mistral3="mistral").get(kind, kind)
    settings = DEFAULTS.get(kind, {}) | hf | text | dict(model_type=kind)
    # gpt-oss has the biases that are in no other family.
    biases = dict(attention_bias=(True,)) if kind == "gpt_oss" else {}
    check_supported(settings, SUPPORTED | biases)
    return settings


def config_from_hf(hf: dict) -> Config:
    """hf: the content of config.json. ValueError for a value that is not supported."""
    hf = text_settings(hf)
    n_head = hf["num_attention_heads"]
    scales = {}
    if hf["model_type"] == "granite":
        scales = dict(
            attention_scale=hf.get("attention_multiplier", 1.0),
            embedding_scale=hf.get("embedding_multiplier", 1.0),
            residual_scale=hf.get("residual_multiplier", 1.0),
            logits_scale=1 / hf.get("logits_scaling", 1.0),
        )
    elif hf["model_type"] == "gemma3_text":
        scales = dict(
            attention_scale=hf["query_pre_attn_scalar"] ** -0.5,
            embedding_scale=hf["hidden_size"] ** 0.5,
        )
    return Config(
        dim=hf["hidden_size"],
        layers=layers_from_hf(hf),
        n_head=n_head,
        n_kv_head=hf.get("num_key_value_heads") or n_head,
        head_dim=head_dim(hf),
        ffn_dim=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        context=hf["max_position_embeddings"],
        norm_eps=hf["rms_norm_eps"],
        tied=hf.get("tie_word_embeddings") or False,
        **scales,
        **FAMILIES[hf["model_type"]],
    )


def head_dim(hf: dict) -> int:
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def layers_from_hf(hf: dict) -> tuple[LayerConfig, ...]:
    """hf: text_settings()'s."""
    kind, n, window = hf["model_type"], hf["num_hidden_layers"], hf.get("sliding_window") or None
    numbers = range(1, n + 1)
    full = LayerConfig(None, rope_from_hf(hf), moe_from_hf(hf))
    if kind == "smollm3":
        turned = hf.get("no_rope_layers") or [i % hf["no_rope_layer_interval"] for i in numbers]
        return tuple(full if turn else LayerConfig() for turn in turned[:n])
    if kind in ("olmo3", "gemma3_text", "gpt_oss"):
        rope = rope_from_hf(hf, sliding=kind != "gpt_oss")
        layers = dict(
            full_attention=full, sliding_attention=replace(full, window=window, rope=rope)
        )
        every = dict(olmo3=4, gemma3_text=hf.get("sliding_window_pattern", 6), gpt_oss=2)[kind]
        nth = ["sliding_attention" if i % every else "full_attention" for i in numbers]
        return tuple(layers[of] for of in (hf.get("layer_types") or nth)[:n])
    if kind == "qwen3_moe":
        dense, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step", 1)
        without = replace(full, moe=None)
        return tuple(without if i - 1 in dense or i % step else full for i in numbers)
    if kind in ("mistral", "ministral3", "phi3", "mixtral"):
        full = replace(full, window=window)
    return (full,) * n


def moe_from_hf(hf: dict) -> MoEConfig | None:
    """hf: text_settings()'s. None for a model without experts."""
    kind = hf["model_type"]
    if "expert_files" not in FAMILIES[kind]:
        return None
    return MoEConfig(
        n_expert=hf.get("num_experts") or hf["num_local_experts"],
        n_chosen=hf["num_experts_per_tok"],
        ffn_dim=hf["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"],
        normalize=hf.get("norm_topk_prob", kind != "qwen3_moe"),
        bias=kind == "gpt_oss",
        clamp=(hf["swiglu_limit"], hf["swiglu_alpha"]) if kind == "gpt_oss" else None,
    )


# Rotary position embeddings


def rope_settings(hf: dict, sliding: bool = False) -> dict:
    """rope_theta, rope_type and what the type needs, of the layers with or without a window. hf: text_settings()'s.

    Newer files have them in rope_parameters, in OLMo 3 and Gemma 3 a dictionary for each kind of layer. Older files
    have rope_theta and rope_scaling, which in these two families is not for layers with a window."""
    found = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = hf.get("rope_theta", 10000.0)
    if sliding:
        theta = hf.get("rope_local_base_freq", theta)
    if "full_attention" in found or "sliding_attention" in found:
        found = found.get("sliding_attention" if sliding else "full_attention") or {}
    elif sliding:
        found = {}
    rope = (
        dict(
            rope_theta=theta,
            partial_rotary_factor=hf.get("partial_rotary_factor", 1.0),
            original_max_position_embeddings=hf["max_position_embeddings"],
        )
        | found
    )
    if "original_max_position_embeddings" in hf:  # Phi has it beside the other settings
        rope["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if hf["model_type"] == "phi3" and kind in ("su", "yarn"):  # older names
        kind = "longrope"
    return rope | dict(rope_type=kind)


def rope_from_hf(hf: dict, sliding: bool = False) -> Rope:
    rope = rope_settings(hf, sliding)
    check_supported(rope, dict(rope_type=tuple(STRETCH)))
    original = rope["original_max_position_embeddings"]
    turned = int(head_dim(hf) * rope["partial_rotary_factor"])
    plain = rope["rope_theta"] ** -(torch.arange(0, turned, 2).float() / turned)  # [R / 2]
    rope["stretch"] = rope.get("factor") or hf["max_position_embeddings"] / original
    scale, *tables = STRETCH[rope["rope_type"]](plain, rope)
    frequencies, *long = (tuple(table.tolist()) for table in tables)
    growth = rope.get("llama_4_scaling_beta") or 0.0
    return Rope(frequencies, scale, original, *long, q_growth=growth)


# Ways to stretch the frequencies [R / 2] for longer texts -> the scale of cos and sin, then the frequencies; LongRoPE's
# are two sets.


def default_rope(plain: Tensor, rope: dict) -> tuple:
    return 1.0, plain


def linear_rope(plain: Tensor, rope: dict) -> tuple:
    return 1.0, plain / rope["factor"]


def llama3_rope(plain: Tensor, rope: dict) -> tuple:
    """Llama 3.1 stretches the long wavelengths, keeps the short ones and blends in between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    # Full turns within the original context.
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return 1.0, keep * plain + (1 - keep) * plain / rope["factor"]


def yarn_rope(plain: Tensor, rope: dict) -> tuple:
    """YaRN (arXiv 2309.00071, sections 3.2 and 3.4): frequencies that make beta_fast turns within the original context
    stay, those that make beta_slow are stretched, and a ramp lies between. The scale sharpens attention."""
    original, pairs = rope["original_max_position_embeddings"], len(plain)
    factor = rope["stretch"]

    def place(turns: float) -> float:
        """The index of the frequency that makes so many turns."""
        return pairs * math.log(original / (2 * math.pi * turns)) / math.log(rope["rope_theta"])

    low, high = place(rope.get("beta_fast") or 32), place(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = ((torch.arange(pairs) - low) / (high - low or 0.001)).clamp(0, 1)

    def temperature(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    scale = rope.get("attention_factor")
    if scale is None:
        m, m_all = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = temperature(m) / temperature(m_all) if m and m_all else temperature(1)
    return scale, ramp * plain / factor + (1 - ramp) * plain


def longrope(plain: Tensor, rope: dict) -> tuple:
    """LongRoPE (arXiv 2402.13753): a factor for each frequency, others for texts beyond the original context."""
    factor, original = rope["stretch"], rope["original_max_position_embeddings"]
    scale = rope.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (plain / torch.tensor(rope[key]) for key in ("short_factor", "long_factor"))
    return scale, short, long


STRETCH = dict(
    default=default_rope, linear=linear_rope, llama3=llama3_rope, yarn=yarn_rope, longrope=longrope
)


# Weights


class Weight(NamedTuple):
    """Where a tensor of Hugging Face's goes: into our parameter, from a row on.

    rows, columns: what ranks share these by, "q" or "kv" heads, "ffn" units or "vocab"; None: each rank has all of
    them. quantized: whether quantization replaces this matrix. norm: it is a norm's. expert: whose it is. experts: it
    is all experts' at once, [X, inputs, outputs], as gpt-oss has it; rows that are "pairs" are a gate's and an up's in
    turns."""

    ours: str
    row: int
    shape: tuple[int, ...]
    rows: str | None = None
    columns: str | None = None
    quantized: bool = False
    norm: bool = False
    expert: int | None = None
    experts: bool = False

    def of(self, parameter: Tensor) -> Tensor:
        """What it is of our parameter, in the file's order."""
        if self.expert is not None:
            parameter = parameter[self.expert]
        if not self.experts:
            return parameter[self.row : self.row + self.shape[0]]
        if len(self.shape) == 3:
            parameter = parameter.mT
        return parameter.unflatten(-1, (2, -1)).mT if self.rows == "pairs" else parameter


def hf_weights(config: Config) -> dict[str, Weight]:
    """Hugging Face's name of each tensor -> its place: the one table of all names. Reading, quantizing and sharing
    among ranks go by it."""
    V, D = config.vocab_size, config.dim
    table = {
        "model.embed_tokens.weight": Weight("embed.weight", 0, (V, D)),
        "model.norm.weight": Weight("norm.weight", 0, (D,), norm=True),
    }
    if not config.tied:
        table["lm_head.weight"] = Weight("head.weight", 0, (V, D), "vocab")
    for i, layer in enumerate(config.layers):
        for name, weight in hf_layer(config, layer.moe).items():
            table[f"model.layers.{i}.{name}"] = weight._replace(ours=f"layers.{i}.{weight.ours}")
    return table


# A layer's tensors: Hugging Face's name, ours, what its rows and columns are (D and E: each rank has all of them), and
# the values of Config's fields with which it is there. What is of one tensor of ours stands in its order.
LAYER = """
self_attn.q_proj.weight             attn.wqkv.weight       q,D        fused_files=False
self_attn.k_proj.weight             attn.wqkv.weight       kv,D       fused_files=False
self_attn.v_proj.weight             attn.wqkv.weight       kv,D       fused_files=False
self_attn.qkv_proj.weight           attn.wqkv.weight       qkv,D      fused_files=True
self_attn.q_proj.bias               attn.wqkv.bias         q          qkv_bias=True
self_attn.k_proj.bias               attn.wqkv.bias         kv         qkv_bias=True
self_attn.v_proj.bias               attn.wqkv.bias         kv         qkv_bias=True
self_attn.o_proj.weight             attn.wo.weight         D,q
self_attn.o_proj.bias               attn.wo.bias           D          o_bias=True
self_attn.sinks                     attn.sinks             heads      sinks=True
self_attn.q_norm.weight             attn.q_norm.weight     E          qk_norm=head
self_attn.k_norm.weight             attn.k_norm.weight     E          qk_norm=head
self_attn.q_norm.weight             attn.q_norm.weight     q          qk_norm=whole
self_attn.k_norm.weight             attn.k_norm.weight     kv         qk_norm=whole
input_layernorm.weight              attn_norm.weight       D          pre_norm=True
post_attention_layernorm.weight     ffn_norm.weight        D          pre_norm=True post_norm=False
pre_feedforward_layernorm.weight    ffn_norm.weight        D          pre_norm=True post_norm=True
post_attention_layernorm.weight     attn_post_norm.weight  D          post_norm=True
post_feedforward_layernorm.weight   ffn_post_norm.weight   D          post_norm=True
mlp.gate_proj.weight                ffn.w_gate_up.weight   ffn,D      fused_files=False
mlp.up_proj.weight                  ffn.w_gate_up.weight   ffn,D      fused_files=False
mlp.gate_up_proj.weight             ffn.w_gate_up.weight   gate_up,D  fused_files=True
mlp.down_proj.weight                ffn.w_down.weight      D,ffn
"""


@lru_cache
def hf_layer(config: Config, moe: MoEConfig | None) -> dict[str, Weight]:
    """hf_weights() of a layer, from LAYER."""
    E, F = config.head_dim, config.ffn_dim
    q, kv = config.n_head * E, config.n_kv_head * E
    sizes = dict(D=config.dim, E=E, heads=config.n_head, q=q, kv=kv, qkv=q + 2 * kv)
    sizes |= dict(ffn=F, gate_up=2 * F)
    table = {}
    for line in LAYER.strip().splitlines():
        name, ours, axes, *values = line.split()
        fields = [value.split("=") for value in values]
        there = all(str(getattr(config, field)) == value for field, value in fields)
        if there and not (moe and ours.startswith("ffn.")):
            axes = axes.split(",")
            shape = tuple(sizes[axis] for axis in axes)
            shared = [None if axis in "DE" else axis for axis in axes]
            row = sum(weight.shape[0] for weight in table.values() if weight.ours == ours)
            is_matrix, is_norm = len(axes) == 2, "norm" in name
            table[name] = Weight(ours, row, shape, *shared, quantized=is_matrix, norm=is_norm)
    return table | hf_experts(config, moe) if moe else table


def hf_experts(config: Config, moe: MoEConfig) -> dict[str, Weight]:
    """hf_layer() of a mixture of experts."""
    D, F, X = config.dim, moe.ffn_dim, moe.n_expert
    part, router, *names = config.expert_files.split()
    up = partial(Weight, "ffn.w_gate_up.weight", quantized=True)
    down = partial(Weight, "ffn.w_down.weight", 0, columns="expert", quantized=True)
    table = {f"{router}.weight": Weight("ffn.router.weight", 0, (X, D))}
    if names:
        gate_name, up_name, down_name = names
        for x in range(X):
            expert = f"experts.{x}"
            table |= {
                f"{expert}.{gate_name}.weight": up(0, (F, D), "expert", expert=x),
                f"{expert}.{up_name}.weight": up(F, (F, D), "expert", expert=x),
                f"{expert}.{down_name}.weight": down((D, F), expert=x),
            }
    else:  # gpt-oss's, all experts in one tensor
        table |= {
            f"{router}.bias": Weight("ffn.router.bias", 0, (X,)),
            "experts.gate_up_proj": up(0, (X, D, 2 * F), "pairs", experts=True),
            "experts.gate_up_proj_bias": Weight(
                "ffn.w_gate_up.bias", 0, (X, 2 * F), "pairs", experts=True
            ),
            "experts.down_proj": down((X, F, D), experts=True),
            "experts.down_proj_bias": Weight("ffn.w_down.bias", 0, (X, D), experts=True),
        }
    return {f"{part}.{name}": weight for name, weight in table.items()}


def count_parameters(config: Config) -> int:
    return sum(math.prod(weight.shape) for weight in hf_weights(config).values())


@lru_cache(maxsize=1)
def open_shard(path: Path):
    """A safetensors file, which stays open for its next tensor: with its header read anew for each of 740 tensors
    Llama-2-7B in 4 bits took 1.36 s to load in place of 0.95 (H200, the file in the page cache)."""
    return safe_open(path, framework="pt")


def read_tensor(
    files: dict[str, Place],
    name: str,
    shapes: list[tuple],
    dtypes: str = FLOATS,
    part: tuple[slice, ...] = (),
) -> Tensor:
    """The tensor, or a part of it, in the host's memory. UserError unless it has one of the shapes.

    Its name is removed from `files`: a name that is still there at the end has no place in the model."""
    if name not in files:
        raise UserError(
            f"the tensor {name} is missing from the safetensors files: config.json is of another model, or "
            "the weights are quantized (generate.load reads these)"
        )
    path, stored = files.pop(name)
    found = open_shard(path).get_slice(stored)
    dtype, shape = found.get_dtype(), tuple(found.get_shape())
    if dtype not in dtypes.split() or shape not in shapes:
        raise UserError(f"{path}: {name} is {dtype} {list(shape)}, want {dtypes} {list(shapes[0])}")
    if part and isinstance(part[0], slice):
        return found[part[: len(shape)]]
    tensor = open_shard(path).get_tensor(stored)
    return tensor[part[0]] if part else tensor  # rows of what Phi's files hold as one


def stored_shape(place: Place) -> tuple[int, ...]:
    return tuple(open_shard(place.path).get_slice(place.name).get_shape())


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    progress: bool = False,
    read_layers: Callable | None = None,
    shard=None,
) -> Transformer:
    """The model, ready for setup(). Its weights go tensor by tensor from the files to the device.

    read_layers(model, files): puts in layers that read their weights from files by themselves, such as quantized
    ones. shard: this rank's part of the model, a tp.Shard."""
    from tqdm import tqdm

    files = checkpoint.files()
    with torch.device("meta"):
        make = checkpoint.make_model
        model = shard.model(make) if shard else make(checkpoint.config)
    if read_layers:
        read_layers(model, files)
    table = checkpoint.weights_of(model.config)
    held = {
        weight.ours: torch.float32 if weight.norm and model.config.norm_fp32 else dtype
        for weight in table.values()
    }
    parameters = {
        name: torch.empty_like(parameter, device=device, dtype=held[name])
        for name, parameter in model.named_parameters()
        if parameter.is_meta and name in held
    }
    names = [name for name, weight in table.items() if weight.ours in parameters]
    names.sort(key=lambda name: str(files.get(name)))  # file by file
    for name in tqdm(names, "loading", delay=1, leave=False, disable=None if progress else True):
        whole, weight = checkpoint.weights[name], table[name]
        tensor = read_tensor(files, name, [whole.shape], part=shard.part(whole) if shard else ())
        if weight.norm:
            tensor = tensor.float() + model.config.norm_offset
        there = weight.of(parameters[weight.ours])
        there.copy_(tensor.reshape(there.shape))
    refuse_surplus(files, checkpoint)
    open_shard.cache_clear()
    model.load_state_dict(parameters, strict=False, assign=True)
    if model.config.tied:
        model.head.weight = model.embed.weight
    return model.eval()


def refuse_surplus(files: dict[str, Place], checkpoint: Checkpoint) -> None:
    """UserError for a tensor that the model has no place for, unless it would change nothing, as a bias of zeros."""
    sizes = [weight.shape[:1] for weight in checkpoint.weights.values()]
    for name, (path, _) in list(files.items()):
        unused = (
            name.endswith("rotary_emb.inv_freq")
            or checkpoint.config.tied
            and name == "lm_head.weight"
        )
        if not unused and (not name.endswith(".bias") or read_tensor(files, name, sizes).any()):
            raise UserError(f"{path}: no place for tensor {name}; config.json is of another model")


# Tokenizer


def render_plainly(template: str, values: dict) -> str:
    """The text of a chat template. jinja2's sandbox keeps it from other code, but not from taking all time and memory:
    guard.render() does."""
    import json
    from datetime import datetime
    from functools import partial
    from jinja2 import TemplateError, ext, nodes, sandbox

    def raise_exception(message: str):
        raise TemplateError(message)

    class Generation(ext.Extension):
        """{% generation %} ... {% endgeneration %} marks an answer, for training: what is between stays.

        What is set there is not set behind it, as in transformers."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True))

    env = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    # Jinja2's own filter escapes for HTML.
    env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    env.globals.update(
        raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form)
    )
    return env.from_string(template).render(values)


class Tokenizer:
    """Text to tokens and back, the tokens that end a text, and the chat template (None where there is none)."""

    render_template = staticmethod(render_plainly)

    def __init__(self, checkpoint: Checkpoint):
        settings = checkpoint.read_json("tokenizer_config.json")
        self.special_tokens = read_special(settings)
        self.template = read_template(checkpoint.directory, settings)
        self.template_options = {}  # variables of the template, such as enable_thinking
        self.bos = checkpoint.hf.get("bos_token_id")
        path = checkpoint.directory / "tokenizer.json"
        if path.exists():
            self.backend = TokenizerJson(path)
            self.add_bos = settings.get("add_bos_token")  # None: the file's post-processor decides
            if self.special_tokens.get("bos_token"):
                self.bos = self.backend.id(self.special_tokens["bos_token"])
        else:
            self.backend = SentencePiece(checkpoint.directory / "tokenizer.model", settings)
            self.add_bos = True
        ends = *CHAT_ENDS, self.special_tokens.get("eos_token")
        self.stops = {self.backend.id(text) for text in ends if text}
        self.stops.update(read_ends(checkpoint.hf), read_ends(checkpoint.generation))
        self.stops.discard(None)
        parts = {self.backend.id(text): text for text in PARTS}
        self.parts = {} if None in parts else parts  # those tokens, of a model that has them all

    def encode_text(self, text: str) -> list[int]:
        """A special token that is written in the text is one. The beginning of sequence is added by tokenizer.json's
        post-processor, unless add_bos_token overrides that; with tokenizer.model alone it is config.json's."""
        ids = self.backend.encode(text, post_process=self.add_bos is None)
        if self.add_bos and self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        return ids

    def encode_chat(self, messages: list[dict]) -> list[int]:
        """[{"role": ..., "content": ...}, ...] -> tokens, through the chat template.

        A special token that is typed in a message counts as a token here, as in transformers: a user who types
        <|im_end|> ends the turn. For guard.VettedTokenizer, which the commands and LLM use, it is text."""
        return self.backend.encode(self.render(messages))

    def render(self, messages: list[dict]) -> str:
        """The text that the chat template makes of messages, up to where the answer begins."""
        values = dict(messages=messages, tools=None, documents=None, add_generation_prompt=True)
        return self.render_template(
            self.template, self.template_options | values | self.special_tokens
        )

    def token(self, i: int) -> str | None:
        """The token's own text."""
        return self.backend.token(i)

    def decode(self, ids: list[int]) -> str:
        """The text, without special tokens."""
        return self.backend.decode(ids)


def any_of(texts: Iterable[str]) -> str:
    """A regular expression. Of texts that begin alike it finds the longest; of no texts, nothing."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)"


def read_ends(settings: dict) -> list[int | None]:
    """eos_token_id of a JSON file: a token, a list of tokens, or nothing."""
    ids = settings.get("eos_token_id")
    return ids if isinstance(ids, list) else [ids]


def read_special(settings: dict) -> dict[str, str]:
    """bos_token, eos_token and the like, which chat templates insert."""
    special = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            special[key] = text
    return special


def read_template(directory: Path, settings: dict) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {of.get("name"): of.get("template") for of in template}.get("default")
    return template


class TokenizerJson:
    """tokenizer.json, through the tokenizers library."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        self.id, self.token = self.tokenizer.token_to_id, self.tokenizer.id_to_token

    def encode(self, text: str, post_process: bool = False, plain: bool = False) -> list[int]:
        """plain: special tokens that are written in the text are text."""
        self.tokenizer.encode_special_tokens = plain
        return self.tokenizer.encode(text, add_special_tokens=post_process).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


class SentencePiece:
    """tokenizer.model, through sentencepiece, which leaves finding special tokens in a text to its callers."""

    def __init__(self, path: Path, settings: dict):
        from sentencepiece import SentencePieceProcessor

        self.processor = SentencePieceProcessor(model_file=str(path))
        self.size = self.processor.vocab_size()
        self.special = {
            self.processor.id_to_piece(i): i
            for i in range(self.size)
            if self.processor.is_control(i)
        }
        added = settings.get("added_tokens_decoder") or {}
        self.special |= {token["content"]: int(i) for i, token in added.items()}

    def id(self, text: str) -> int | None:
        found = self.special.get(text, self.processor.piece_to_id(text))
        return None if found == self.processor.unk_id() else found

    def token(self, i: int) -> str | None:
        return self.processor.id_to_piece(i) if i < self.size else None

    def encode(self, text: str, post_process: bool = False, plain: bool = False) -> list[int]:
        special = {} if plain else self.special
        ids = []
        for part in re.split(f"({any_of(special)})", text):
            ids += [special[part]] if part in special else self.processor.encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.processor.decode([i for i in ids if i < self.size])
