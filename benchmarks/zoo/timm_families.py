"""The smallest model of each of timm's modules, made smaller where its options allow it.

Needs timm, which needs torchvision; ``networks`` raises ``ImportError`` without them. All models
are built without weights; ``MODELS`` has the name with the fewest parameters of each module.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.network import CLASSES, Batch, Network, NotBuiltError, classify, numbers

LARGEST = 12_000_000
SAMPLES = 3
SIDE = 64

MODELS = (
    *("beit_base_patch16_224", "halonet_h1", "test_byobnet", "cait_xxs24_224", "coat_tiny"),
    *("convit_tiny", "convmixer_768_32", "test_convnext", "cpubone_nano", "crossvit_tiny_240"),
    *("csatv2", "cs3darknet_focus_s", "cspnext_tiny", "davit_tiny", "deepseek_vit_412m"),
    *("deit_tiny_patch16_224", "densenet121", "dla46x_c", "dpn48b", "edgenext_xx_small"),
    *("efficientformer_l1", "efficientformerv2_s0", "mnasnet_small", "efficientvim_m1"),
    *("efficientvit_b0", "efficientvit_m0", "eva02_tiny_patch14_224", "fasternet_t0"),
    *("fastvit_t8", "focalnet_tiny_srf", "gcvit_xxtiny", "gemma4_vit_167m_enc", "ghostnet_050"),
    *("hardcorenas_b", "hgnetv2_b0", "hiera_tiny_224", "sam2_hiera_tiny", "hrnet_w18_small"),
    *("iformer_t", "inception_next_atto", "inception_resnet_v2", "inception_v3", "inception_v4"),
    *("lcnetv2_small", "levit_128s", "lowformer_b0", "test_mambaout", "test_coatnet"),
    *("poolformerv2_s12", "gmlp_ti16_224", "lcnet_035", "mobilenetv5_base", "mobilevit_xxs"),
    *("mvitv2_tiny", "naflexvit_so150m2_patch16_reg1_gap", "nasnetalarge", "nest_tiny"),
    *("nextvit_small", "test_nfnet", "pit_ti_224", "pnasnet5large", "pvt_v2_b0", "qwen3_vit_88m"),
    *("rdnet_tiny", "regnetx_002", "repghostnet_050", "repvit_m1", "res2next50", "resnest14d"),
    *("resnet10t", "resnetv2_18", "rexnet_100", "selecsls42", "legacy_seresnet18"),
    *("sequencer2d_s", "shvit_s1", "skresnet18", "starnet_s050", "swiftformer_xs"),
    *("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swinv2_cr_tiny_224"),
    *("tiny_vit_5m_224", "tnt_s_legacy_patch16_224", "tresnet_m", "twins_svt_small", "vgg11"),
    *("visformer_tiny", "test_vit", "vit_tiny_r_s16_p8_224", "test_vit_relpos"),
    *("samvit_base_patch16_224", "vitamin_small_224", "volo_d1_224", "ese_vovnet19b_slim_dw"),
    *("legacy_xception", "xception41p", "xcit_nano_12_p8_224"),
)

SLOW = ("halonet_h1",)
"""Models that take 20 seconds for a backward pass."""

FOUR = (1, 1, 1, 1)
WIDTHS = (8, 16, 24, 32)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"embed_dim": 32, "depth": 2, "num_heads": 4},
    {"embed_dim": 32, "depth": 2},
    {"embed_dim": 16, "depths": FOUR, "num_heads": (1, 2, 2, 4)},
    {"embed_dims": WIDTHS, "depths": FOUR, "num_heads": (1, 2, 2, 4)},
    {"embed_dim": 16, "depths": FOUR},
    {"embed_dim": 16, "stages": FOUR},
    {"depths": FOUR, "dims": WIDTHS},
    {"depths": FOUR, "embed_dims": WIDTHS},
    {"layers": FOUR, "embed_dims": WIDTHS},
    {"layers": FOUR, "channels": WIDTHS},
    {"layers": FOUR, "width_factor": 0.125},
    {"layers": FOUR, "base_width": 8},
    {"layers": FOUR},
    {"depths": FOUR},
    {"growth_rate": 4, "block_config": FOUR, "num_init_features": 8},
    {"channel_multiplier": 0.25},
    {},
)
"""What makes models of one or the other class small, tried in turn."""


class Model:
    """One of timm's models, made as small as can be."""

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def size(self) -> tuple[dict[str, Any], int]:
        """The first options that give a model that runs and isn't too large, and its images."""
        if self.name in SLOW:
            raise NotBuiltError("too slow")
        smallest = float("inf")
        for options in self._candidates():
            model = self._abstract(options)
            side = self._side(model) if model is not None else 0
            if model is None or not side:
                continue
            count = sum(p.numel() for p in model.parameters())
            smallest = min(smallest, count)
            if count <= LARGEST:
                return options, side
        raise NotBuiltError(f"too large: {smallest} parameters")

    def _candidates(self) -> Iterator[dict[str, Any]]:
        for options in OPTIONS:
            yield {**options, "img_size": SIDE}
            yield options

    def _abstract(self, options: dict[str, Any]) -> nn.Module | None:
        """Without memory; ``None`` if the class knows no such options."""
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            try:
                return self._created(options).eval()
            except Exception:
                return None

    def _created(self, options: dict[str, Any]) -> nn.Module:
        import timm

        return timm.create_model(self.name, num_classes=CLASSES, **options)

    def _side(self, model: nn.Module) -> int:
        """Of images that the model takes, small ones if it can; 0 if it takes none."""
        for side in (SIDE, model.pretrained_cfg["input_size"][-1]):
            try:
                with torch.device("meta"):
                    model(torch.zeros(2, 3, side, side))
            except Exception:
                continue
            return side
        return 0

    def build(self) -> nn.Module:
        """Without weights."""
        return self._created(self.size[0])

    def batch(self) -> Batch:
        """Images of the size that the model takes."""
        return numbers(SAMPLES, 3, self.size[1], self.size[1])()


def networks() -> list[Network]:
    """All of them, built when they are needed."""
    import timm  # noqa: F401

    return [_network(Model(name)) for name in MODELS]


def _network(model: Model) -> Network:
    build, batch = partial(Model.build, model), partial(Model.batch, model)
    return Network(model.name, "timm", build, batch, classify, SAMPLES)
