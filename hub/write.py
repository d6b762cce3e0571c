"""
Writes quantized checkpoints, as cli/quantize.py asks for them: GPTQ's format, 4 and 8 bits, and
compressed-tensors' pack-quantized. formats.py reads them, and has the layouts.

Another format is an entry of CONFIGS, what config.json then says, and one of TENSORS, how a layer
is held.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hub.checkpoint import (
    INDEX,
    Checkpoint,
    each_expert,
    hf_weights,
    is_inside,
    read_tensor,
    reading,
)
from hub.formats import stem
from hub.tokenizer import MOST_TOKENIZER
from hub.vet import GIB
from model import Transformer
from quantize import LEFT_OUT, QuantizedLinear, pack

SHARD_BYTES = 4 * GIB


def gptq_config(bits: int, group_size: int, sym: bool, act_order: bool, head: bool) -> dict:
    """quantization_config of a GPTQ checkpoint.

    gptqmodel 7.7 reads other programs' asymmetric weights as gptq_v2 alone. Symmetric ones stay
    gptq, which older programs read too."""
    return dict(
        bits=bits,
        group_size=group_size,
        sym=sym,
        desc_act=act_order,
        lm_head=head,
        quant_method="gptq",
        checkpoint_format="gptq" if sym else "gptq_v2",
    )


def compressed_tensors_config(
    bits: int, group_size: int, sym: bool, act_order: bool, head: bool
) -> dict:
    """quantization_config of a compressed-tensors checkpoint, pack-quantized. ValueError for
    act-order, whose g_idx the package no longer reads."""
    if act_order:
        raise ValueError(
            "--act-order: compressed-tensors reads it no more; leave it out, or take --format gptq"
        )
    strategy = "channel" if group_size == -1 else "group"
    weights = dict(
        num_bits=bits,
        type="int",
        symmetric=sym,
        dynamic=False,
        strategy=strategy,
        group_size=group_size,
    )
    groups = dict(group_0=dict(targets=["Linear"], weights=weights))
    return dict(
        quant_method="compressed-tensors",
        format="pack-quantized",
        quantization_status="compressed",
        ignore=[] if head else ["lm_head"],
        config_groups=groups,
    )


CONFIGS = {"gptq": gptq_config, "compressed-tensors": compressed_tensors_config}


def gptq_tensors(layer: QuantizedLinear, rows: Tensor, config: dict) -> dict[str, Tensor]:
    """The tensors of some rows of a layer, as formats.read_gptq() describes them. Other programs
    round scales of fp32, which tiny weights have, to fp16."""
    stored = layer.zero_points()[rows] - int(config["checkpoint_format"] == "gptq")
    return dict(
        qweight=layer.qweight[rows].T,
        qzeros=pack(stored.T, layer.codes.bits),
        scales=layer.scales[rows].T,
        g_idx=layer.groups().int(),
    )


def packed_tensors(layer: QuantizedLinear, rows: Tensor, config: dict) -> dict[str, Tensor]:
    """The tensors of some rows of a layer, as formats.read_packed() describes them."""
    qweight = layer.qweight[rows]
    tensors = dict(
        weight_packed=qweight,
        weight_scale=layer.scales[rows],
        weight_shape=torch.tensor([len(qweight), layer.in_features]),
    )
    if layer.zeros is not None:
        tensors["weight_zero_point"] = pack(layer.zeros[rows].T, layer.codes.bits).T
    return tensors


TENSORS = {"gptq": gptq_tensors, "compressed-tensors": packed_tensors}


def quantized_tensors(
    model: Transformer, source: Checkpoint, config: dict
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint: quantized layers as config says, the others as source has
    them."""
    files = source.files()
    for name, weight in hf_weights(each_expert(source.config)).items():
        layer = model.get_submodule(weight.ours.rpartition(".")[0])
        if len(weight.shape) == 1 or not isinstance(layer, QuantizedLinear):
            yield name, read_tensor(files, name, [weight.shape])
            continue
        if weight.expert is not None:
            layer = layer.expert(weight.expert)
        # The file's row i is this row of ours.
        rows = weight.by_kind(torch.arange(weight.shape[0])).argsort() + weight.row
        for kind, tensor in TENSORS[config["quant_method"]](layer, rows, config).items():
            yield f"{stem(name)}.{kind}", tensor


def write_shards(tensors: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    """Writes safetensors files of at most SHARD_BYTES, and an index if there are several. The host
    holds what is not quantized, and the codes of one file at a time."""
    from huggingface_hub import split_torch_state_dict_into_shards

    held = dict(tensors)
    # On meta, as tensors that share memory would stay in one file.
    sizes = {name: tensor.to("meta") for name, tensor in held.items()}
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        path = directory / file
        tensors = {name: held[name].contiguous().cpu() for name in names}
        with reading(path):  # a full disk raises an exception of its own
            save_file(tensors, path, metadata={"format": "pt"})
            path.chmod(0o644)  # safetensors lets its owner alone read it
    if split.is_sharded:
        write_json(
            directory / INDEX, dict(metadata=split.metadata, weight_map=split.tensor_to_filename)
        )


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_checkpoint(
    model: Transformer, source: Checkpoint, directory: Path, quantization_config: dict
) -> None:
    """The weights of the model, the tokenizer's files and the like of the source."""
    write_shards(quantized_tensors(model, source, quantization_config), directory)
    templates = source.directory.glob("additional_chat_templates/*.jinja")
    for path in [*source.directory.iterdir(), *templates]:
        is_copied = path.suffix in (".json", ".model", ".jinja", ".txt")
        # Nothing that a link takes from elsewhere, nor what is no such file by its size.
        if (
            is_copied
            and ".index" not in path.suffixes
            and path.is_file()
            and is_inside(path)
            and path.stat().st_size <= MOST_TOKENIZER
        ):
            place = directory / path.relative_to(source.directory)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, place)
    if "ignore" in quantization_config:  # to other readers they are linear layers like others
        left = [
            stem(of)
            for of, weight in source.weights.items()
            if stem(weight.ours).endswith(LEFT_OUT)
        ]
        ignored = quantization_config["ignore"] + left
        quantization_config = quantization_config | dict(ignore=ignored)
    hf = source.hf | dict(quantization_config=quantization_config)
    for part in ("vision_config", "audio_config"):  # what is written is the text part
        hf.pop(part, None)
    write_json(directory / "config.json", hf)
