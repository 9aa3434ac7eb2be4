"""Small models of transformers with random weights, one row each: classes, config, inputs. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

VOCABULARY = 99
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TEXT = {**SMALL, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**TEXT, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# A pattern of layers that has one of each kind.
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 8}

Inputs = Callable[[], dict[str, Any]]


def ids() -> dict[str, Any]:
    return {"input_ids": torch.randint(5, 90, (2, 12))}


def masked_ids() -> dict[str, Any]:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:] = 0
    return {**ids(), "attention_mask": mask}


def generating() -> dict[str, Any]:
    """One step of a causal model, without a cache of keys and values."""
    return {**masked_ids(), "use_cache": False}


def plain_generating() -> dict[str, Any]:
    return {**ids(), "use_cache": False}


def pixels(size: int = 32) -> Inputs:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


def sound(samples: int = 800) -> Inputs:
    return lambda: {"input_values": torch.randn(1, samples)}


def spectrum(frames: int, bins: int, *, bins_first: bool = False) -> Inputs:
    shape = (1, bins, frames) if bins_first else (1, frames, bins)
    return lambda: {"input_features": torch.randn(shape)}


def clip_inputs() -> dict[str, Any]:
    return {**masked_ids(), **pixels()()}


def two_sided(first: Inputs) -> Inputs:
    """Inputs of an encoder, and those of the decoder behind it."""
    return lambda: {**first(), "decoder_input_ids": torch.randint(5, 90, (1, 6)), "use_cache": False}


@dataclass(frozen=True)
class Row:
    """`model`, `config`: names of classes in transformers; `nested`: fields of the config that are configs."""

    model: str
    config: str
    inputs: Inputs
    settings: dict[str, Any] = field(default_factory=dict)
    nested: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)


CONVOLUTIONS = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "vocab_size": VOCABULARY,
}
IMAGE = {**SMALL, "image_size": 32, "patch_size": 8}
HYBRID = {**GROUPED, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}

ROWS: dict[str, Row] = {
    # text
    "bert": Row("BertModel", "BertConfig", masked_ids, TEXT),
    "roberta": Row("RobertaModel", "RobertaConfig", masked_ids, {**TEXT, "pad_token_id": 1, "bos_token_id": 0}),
    "distilbert": Row(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        masked_ids,
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": VOCABULARY},
    ),
    "modernbert": Row(
        "ModernBertModel", "ModernBertConfig", masked_ids, {**TEXT, "cls_token_id": 1, "sep_token_id": 2}
    ),
    "deberta-v2": Row("DebertaV2Model", "DebertaV2Config", masked_ids, TEXT),
    "t5-encoder": Row(
        "T5EncoderModel",
        "T5Config",
        masked_ids,
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY},
    ),
    "gpt2": Row(
        "GPT2LMHeadModel",
        "GPT2Config",
        plain_generating,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY},
    ),
    "llama": Row("LlamaForCausalLM", "LlamaConfig", generating, GROUPED),
    "qwen3": Row("Qwen3ForCausalLM", "Qwen3Config", generating, {**GROUPED, "head_dim": 8}),
    "gemma3": Row("Gemma3ForCausalLM", "Gemma3TextConfig", generating, {**GROUPED, "head_dim": 8}),
    "smollm3": Row("SmolLM3ForCausalLM", "SmolLM3Config", generating, GROUPED),
    "phi3": Row("Phi3ForCausalLM", "Phi3Config", generating, GROUPED),
    # mixtures of experts
    "mixtral": Row("MixtralForCausalLM", "MixtralConfig", generating, {**GROUPED, **EXPERTS}),
    "qwen3-moe": Row("Qwen3MoeForCausalLM", "Qwen3MoeConfig", generating, {**GROUPED, **EXPERTS, "head_dim": 8}),
    "gpt-oss": Row("GptOssForCausalLM", "GptOssConfig", generating, {**GROUPED, **EXPERTS, "head_dim": 8}),
    "olmoe": Row("OlmoeForCausalLM", "OlmoeConfig", generating, {**GROUPED, **EXPERTS}),
    "llama4": Row(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        generating,
        {**GROUPED, **EXPERTS, "head_dim": 8, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2},
    ),
    "deepseek-v3": Row(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        generating,
        {
            **TEXT,
            **EXPERTS,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "granite-moe": Row("GraniteMoeForCausalLM", "GraniteMoeConfig", generating, {**GROUPED, **EXPERTS}),
    # state-space, recurrent and hybrid
    "mamba": Row("MambaForCausalLM", "MambaConfig", plain_generating, MAMBA),
    "mamba2": Row(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        plain_generating,
        {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    ),
    "falcon-mamba": Row("FalconMambaForCausalLM", "FalconMambaConfig", plain_generating, MAMBA),
    "falcon-h1": Row(
        "FalconH1ForCausalLM", "FalconH1Config", generating, {**HYBRID, "mamba_d_ssm": 64, "mamba_chunk_size": 4}
    ),
    "bamba": Row(
        "BambaForCausalLM",
        "BambaConfig",
        generating,
        {**HYBRID, "attn_layer_indices": [1], "mamba_chunk_size": 4},
    ),
    "jamba": Row(
        "JambaForCausalLM",
        "JambaConfig",
        generating,
        {
            **GROUPED,
            **EXPERTS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "recurrent-gemma": Row(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        generating,
        {**GROUPED, "head_dim": 8, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
    ),
    "lfm2": Row("Lfm2ForCausalLM", "Lfm2Config", generating, {**GROUPED, "layer_types": ["conv", "full_attention"]}),
    # speech
    "wav2vec2": Row("Wav2Vec2Model", "Wav2Vec2Config", sound(), {**SMALL, **CONVOLUTIONS}),
    "hubert": Row("HubertModel", "HubertConfig", sound(), {**SMALL, **CONVOLUTIONS}),
    "wav2vec2-bert": Row(
        "Wav2Vec2BertModel",
        "Wav2Vec2BertConfig",
        spectrum(24, 16),
        {**SMALL, "feature_projection_input_dim": 16, "vocab_size": VOCABULARY, "conv_depthwise_kernel_size": 7},
    ),
    "parakeet-ctc": Row(
        "ParakeetForCTC",
        "ParakeetCTCConfig",
        spectrum(64, 16),
        {"vocab_size": VOCABULARY, "pad_token_id": 98},
        {
            "encoder_config": (
                "ParakeetEncoderConfig",
                {**SMALL, "num_mel_bins": 16, "subsampling_conv_channels": 8, "conv_kernel_size": 7},
            )
        },
    ),
    "whisper": Row(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        two_sided(spectrum(64, 16, bins_first=True)),
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 16,
            "vocab_size": VOCABULARY,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    "moonshine": Row(
        "MoonshineForConditionalGeneration",
        "MoonshineConfig",
        two_sided(sound(4000)),
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "vocab_size": VOCABULARY,
        },
    ),
    # images
    "vit": Row("ViTModel", "ViTConfig", pixels(), IMAGE),
    "dinov3": Row("DINOv3ViTModel", "DINOv3ViTConfig", pixels(), IMAGE),
    "clip": Row(
        "CLIPModel",
        "CLIPConfig",
        clip_inputs,
        {"projection_dim": 16},
        {"text_config": ("CLIPTextConfig", TEXT), "vision_config": ("CLIPVisionConfig", IMAGE)},
    ),
    "siglip-vision": Row("SiglipVisionModel", "SiglipVisionConfig", pixels(), IMAGE),
    "segformer": Row(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        pixels(64),
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [4, 2],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
        },
    ),
    "depth-anything": Row(
        "DepthAnythingForDepthEstimation",
        "DepthAnythingConfig",
        pixels(56),
        {
            "reassemble_hidden_size": 32,
            "patch_size": 14,
            "neck_hidden_sizes": [8, 16, 16, 16],
            "fusion_hidden_size": 8,
            "head_in_index": -1,
        },
        {
            "backbone_config": (
                "Dinov2Config",
                {
                    "hidden_size": 32,
                    "num_hidden_layers": 4,
                    "num_attention_heads": 4,
                    "image_size": 56,
                    "patch_size": 14,
                    "out_indices": [1, 2, 3, 4],
                    "reshape_hidden_states": False,
                    "apply_layernorm": True,
                },
            )
        },
    ),
}


def build(kind: str) -> tuple[nn.Module, Any]:
    """The model and one batch."""
    import transformers

    if kind == "whisper-encoder":
        model, inputs = build("whisper")
        encoder: nn.Module = model.model.encoder
        return encoder, {"input_features": inputs["input_features"]}
    row = ROWS[kind.removesuffix("-batched")]
    nested = {name: getattr(transformers, config)(**values) for name, (config, values) in row.nested.items()}
    config = getattr(transformers, row.config)(**row.settings, **nested)
    if kind.endswith("-batched"):  # experts by indexing and one product, which torch.export follows
        config._experts_implementation = "batched_mm"
    return getattr(transformers, row.model)(config), row.inputs()


KINDS = (*ROWS, "whisper-encoder", "mixtral-batched")
