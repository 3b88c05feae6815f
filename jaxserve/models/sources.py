"""Where each parameter's values stand in a checkpoint: names, and how they are laid out there.

Parameters are named by their path in the decoder ("layers.3.attention.inputs.q.weight").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jaxserve.config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One parameter's place in a checkpoint.

    name: the tensor there; shape: its whole shape, which is the parameter's unless it is fused.
    first_row: where the parameter's rows begin in a fused tensor.
    interleaved_head: None, or the head size when the rows of each head come as pairs
    (0, H/2, 1, H/2 + 1, ...), as llama.cpp stores q and k of the Llama family.
    add: added to every value (-1 where norm weights are stored plus one).
    """

    name: str
    shape: tuple[int, ...]
    first_row: int = 0
    interleaved_head: int | None = None
    add: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NameTable:
    """Names of a convention, by module path. `layer` holds a `{}` for the layer's number."""

    top: Mapping[str, str]
    layer: str
    parts: Mapping[str, str]

    def name(self, path: str) -> str:
        """The checkpoint's name of the parameter at this path."""
        module, _, leaf = path.rpartition(".")
        if module in self.top:
            return f"{self.top[module]}.{leaf}"
        _, number, part = module.split(".", 2)
        return f"{self.layer.format(number)}.{self.parts[part]}.{leaf}"


#: A family's last word on a source: (config, path, plain source) -> source.
Adapt = Callable[[ModelConfig, str, Source], Source]


def keep(config: ModelConfig, path: str, source: Source) -> Source:
    """For families whose tensors are the parameters as they are."""
    del config, path
    return source


HF_NAMES = NameTable(
    top={"embed": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"},
    layer="model.layers.{}",
    parts={
        "attention_norm": "input_layernorm",
        "attention.inputs.q": "self_attn.q_proj",
        "attention.inputs.k": "self_attn.k_proj",
        "attention.inputs.v": "self_attn.v_proj",
        "attention.o": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn.inputs.gate": "mlp.gate_proj",
        "ffn.inputs.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj",
    },
)

GGUF_NAMES = NameTable(
    top={"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output"},
    layer="blk.{}",
    parts={
        "attention_norm": "attn_norm",
        "attention.inputs.q": "attn_q",
        "attention.inputs.k": "attn_k",
        "attention.inputs.v": "attn_v",
        "attention.o": "attn_output",
        "attention.q_norm": "attn_q_norm",
        "attention.k_norm": "attn_k_norm",
        "ffn_norm": "ffn_norm",
        "ffn.inputs.gate": "ffn_gate",
        "ffn.inputs.up": "ffn_up",
        "ffn.down": "ffn_down",
        "post_attention_norm": "post_attention_norm",
        "post_ffn_norm": "post_ffw_norm",
    },
)
