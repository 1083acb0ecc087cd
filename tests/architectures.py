"""Small models of many architectures, as functions for --module: see test_estimate.py."""

import torch
import torchvision
import transformers
from torch import nn

IDS = torch.zeros(2, 16, dtype=torch.int64)
IMAGES = torch.zeros(2, 3, 32, 32)
TEXT = {"input_ids": IDS, "labels": IDS}
BLOCKS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
BLOCKS |= {"num_attention_heads": 4}
VISION = BLOCKS | {"image_size": 32, "patch_size": 16}
WORDS = BLOCKS | {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
GROUPED = WORDS | {"num_key_value_heads": 2}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SIDES = {"d_model": 32, "vocab_size": 96, "pad_token_id": 0, "decoder_start_token_id": 0}
for side in ("encoder", "decoder"):
    SIDES |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}


def of(name, batch, **sizes):
    kind = getattr(transformers, name)
    return lambda: (kind(kind.config_class(**sizes)), batch)


class TwoInputs(nn.Module):
    """Two floating-point inputs, and several outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(6, 4)

    def forward(self, x, y):
        y = self.second(y)
        return self.first(x) + y, {"second": y}


class Denoiser(nn.Module):
    """A diffusion step: images with noise, and a time for each."""

    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, 8)
        sizes = ((3, 8), (8, 3))
        self.layers = nn.ModuleList(nn.Conv2d(*size, 3, padding=1) for size in sizes)

    def forward(self, noisy, time):
        x = self.layers[0](noisy) + self.time(time)[:, :, None, None]
        return self.layers[1](nn.functional.silu(x))


class Translator(nn.Transformer):
    def __init__(self):
        super().__init__(32, 4, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, source, target):
        return self.head(super().forward(source, target)).movedim(2, 1)


class Reader(nn.Module):
    """Also a positional input that has no batch dimension."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x, positions):
        return self.head(self.layer(x + positions)[0][:, -1])


def denoiser():
    batch = {"noisy": IMAGES, "time": torch.zeros(2, 1), "noise": IMAGES}
    return Denoiser(), batch, lambda out, batch: (out - batch["noise"]).square().mean()


def segmentation():
    options = {"weights": None, "weights_backbone": None, "num_classes": 5}
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(**options)
    return model, torch.zeros(2, 3, 64, 64), lambda out, _: out["out"].square().mean()


def detector():
    options = {"weights": None, "weights_backbone": None, "num_classes": 5}
    model = torchvision.models.detection.fcos_resnet50_fpn(**options)
    targets = [{"boxes": torch.zeros(1, 4), "labels": torch.zeros(1, dtype=torch.int64)}] * 2
    return model, ([*IMAGES], targets), lambda out, _: sum(out.values())


def clip():
    sizes = {"text_config": WORDS, "vision_config": VISION, "projection_dim": 16}
    model = transformers.CLIPModel(transformers.CLIPConfig(**sizes))
    batch = {"input_ids": IDS, "pixel_values": IMAGES}
    return model, batch, lambda out, _: out.logits_per_text.square().mean()


ARCHITECTURES = {
    "two_inputs": lambda: (TwoInputs(), (torch.zeros(2, 8), torch.zeros(2, 6))),
    "denoiser": denoiser,
    "translator": lambda: (Translator(), (torch.zeros(2, 16, 32), torch.zeros(2, 8, 32))),
    "reader": lambda: (Reader(), (torch.zeros(2, 12, 8), torch.zeros(12, 8))),
    "segmentation": segmentation,
    "detector": detector,
    "video": lambda: (torchvision.models.video.mc3_18(num_classes=5), torch.zeros(2, 3, 4, 32, 32)),
    "swin": lambda: torchvision.models.swin_t(num_classes=5),
    "convnext": lambda: torchvision.models.convnext_tiny(num_classes=5),
    "mixtral": of("MixtralForCausalLM", TEXT, **GROUPED, num_local_experts=4),
    "qwen3_moe": of("Qwen3MoeForCausalLM", TEXT, **GROUPED, **MIXTURE, num_experts=4),
    "deepseek": of(
        "DeepseekV3ForCausalLM", TEXT, **WORDS, **MIXTURE, num_key_value_heads=4, n_group=1,
        n_routed_experts=4, topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    ),
    "gemma": of("Gemma2ForCausalLM", TEXT, **GROUPED, head_dim=8),
    "mamba": of("MambaForCausalLM", TEXT, hidden_size=32, num_hidden_layers=2, vocab_size=96),
    "t5": of(
        "T5ForConditionalGeneration", TEXT, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        vocab_size=96, decoder_start_token_id=0,
    ),
    "bart": of("BartForConditionalGeneration", TEXT, **SIDES, bos_token_id=0, eos_token_id=0),
    "whisper": of(
        "WhisperForConditionalGeneration",
        {"input_features": torch.zeros(2, 80, 200), "labels": IDS},
        **SIDES, max_source_positions=100, bos_token_id=0, eos_token_id=0,
    ),
    "hubert": of(
        "HubertForSequenceClassification",
        {"input_values": torch.zeros(2, 4000), "labels": torch.zeros(2, dtype=torch.int64)},
        **BLOCKS, conv_dim=[16] * 7, mask_time_prob=0.0,
    ),
    "clip": clip,
    "masked_autoencoder": of(
        "ViTMAEForPreTraining", {"pixel_values": IMAGES}, **VISION, decoder_hidden_size=32,
        decoder_num_hidden_layers=1, decoder_num_attention_heads=4, decoder_intermediate_size=32,
    ),
    "modernbert": of("ModernBertForMaskedLM", TEXT, **WORDS, cls_token_id=0, sep_token_id=0),
}  # fmt: skip
globals().update(ARCHITECTURES)
