"""
Multi-token prediction: the layer that Qwen3.5 to 3.8 and Qwen3-Next (`mtp.*`), GLM-4.7-Flash and
DeepSeek-V3 (the layer behind the last) bring in their own files, and that was trained to predict
the token after the next one (arXiv 2412.19437, section 2.2). --draft mtp drafts with it.

heads.py says what it reads when, and drafts with it. The target's feature is its last hidden state
behind its final norm. With the next token's embedding it goes, both normed, through fc into a layer
like the target's attention layers. The embedding and the output head are the target's, of which
DeepSeek-V3's files have copies. To draft more than one token the layer runs again, on its own
output: Qwen's behind the layer's own final norm, DeepSeek's and GLM's in front of it, as vLLM has
them.

Shapes: as in heads.py.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn as nn

from drafts.heads import DraftHead
from hub.checkpoint import Checkpoint, Place, Weight, borrowing_weights
from hub.families import EXPERTS, value_of
from model import Config, RMSNorm, Transformer

COPIES = "embed_tokens.weight", "shared_head.head.weight"  # of the target's


@dataclass(frozen=True)
class Names:
    """What a family calls the tensors, behind a prefix."""

    prefix: str
    fc: str = "fc"
    embedding_norm: str = "pre_fc_norm_embedding"
    state_norm: str = "pre_fc_norm_hidden"
    norm: str = "norm"
    layer: str = "layers.0."  # what is in the layer begins so
    n_layers: str = "mtp_num_hidden_layers"  # config.json's key

    def of(self, name: str) -> str:
        """Of a tensor that any model of one layer has."""
        if name == "norm.weight":
            return f"{self.norm}.weight"
        return self.layer + name.removeprefix("layers.0.")


def is_behind(config: Config) -> bool:
    """Whether the layer is as DeepSeek-V3's, behind the last, and not as Qwen's. All families that
    have it so have latent attention, too."""
    return config.layers[-1].latent is not None


def names_of(config: Config) -> Names:
    """config: the target's."""
    if not is_behind(config):
        return Names("mtp.")
    names = "eh_proj", "enorm", "hnorm", "shared_head.norm", "", "num_nextn_predict_layers"
    return Names(f"layers.{config.n_layer}.", *names)


class MtpHead(DraftHead):
    def __init__(self, config: Config, n_layer: int):
        """n_layer: the target's."""
        super().__init__(config)
        D = config.dim
        self.norm_output = not is_behind(config)
        self.target_places, self.head_size = (n_layer,), config.vocab_size
        self.embedding_norm, self.state_norm = RMSNorm(D, config), RMSNorm(D, config)
        self.fc = nn.Linear(2 * D, D, bias=False)
        self.target_norm = None

    def share(self, target: Transformer):
        self.embed, self.head, self.target_norm = target.embed, target.head, target.norm

    def project(self, features):
        return self.target_norm(features)

    def inputs(self, tokens, states):
        pair = self.embedding_norm(self.embedded(tokens)), self.state_norm(states)
        return self.fc(torch.cat(pair, dim=-1))


class MtpCheckpoint(Checkpoint):
    """Of the target's Checkpoint, the tensors that draft. ValueError where there are none."""

    told_by_tensors = True  # those who quantize a model leave it out, and do not always say so

    def __init__(self, target: Checkpoint):
        vars(self).update(vars(target))
        vars(self).pop("weights", None)  # the target's
        config = target.config
        self.names = names = names_of(config)
        files = self.files()
        if f"{names.fc}.weight" not in files:
            raise ValueError(
                f"draft=mtp: {self.directory} has no {names.prefix}{names.fc}.weight: want a "
                "checkpoint that brings its own draft, as Qwen3.5 does, or another draft"
            )
        # Qwen3-Next's files say nothing.
        n = value_of(self.hf, names.n_layers, int, 1, or_zero=True)
        own = value_of(self.hf, "mtp_use_dedicated_embeddings", bool, False)
        if n != 1 or own:
            raise ValueError(
                f"draft=mtp: {self.directory}: {names.n_layers}={n}, "
                f"mtp_use_dedicated_embeddings={own}: want 1 and false"
            )
        layers = [layer for layer in reversed(config.layers) if not layer.delta]
        if any(".experts." in name for name in files):  # while the last layers may be dense
            layers = [layer for layer in layers if layer.moe]
        if not layers:
            raise ValueError(
                f"draft=mtp: {self.directory} has no layer of the kind that its draft is, attention "
                "with or without experts: want another draft"
            )
        experts = config.expert_files
        if experts:  # in one tensor or each its own, as the target's or not
            in_one = any(name.endswith(".gate_up_proj") for name in files)
            experts = EXPERTS[: 2 if in_one else None]
        self.n_layer, self.places = config.n_layer, (config.n_layer,)
        self.config = replace(config, layers=(layers[0],), tied=False, expert_files=experts)

    def files(self) -> dict[str, Place]:
        places = {
            name.removeprefix("model."): place for name, place in self.of_text(self.paths).items()
        }
        prefix = self.names.prefix
        found = {
            name.removeprefix(prefix): place
            for name, place in places.items()
            if name.startswith(prefix)
        }
        return {name: place for name, place in found.items() if name not in COPIES}

    def counted(self) -> Config:
        """Embedding and head are the target's, and count there."""
        return replace(self.config, vocab_size=0, tied=True)

    def make_model(self, config: Config) -> MtpHead:
        return MtpHead(config, self.n_layer)

    def weights_of(self, config: Config) -> dict[str, Weight]:
        D, names = config.dim, self.names
        table = {names.of(name): weight for name, weight in borrowing_weights(config).items()}
        return table | {
            f"{names.fc}.weight": Weight("fc.weight", 0, (D, 2 * D)),
            f"{names.embedding_norm}.weight": Weight("embedding_norm.weight", 0, (D,), norm=True),
            f"{names.state_norm}.weight": Weight("state_norm.weight", 0, (D,), norm=True),
        }
