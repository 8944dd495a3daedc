"""Presets: defaults that are applied before the file, whose keys win.

Mappings are merged, lists and values replaced. Besides sections a preset may say what `fields` a method has, and which
sections hold in a run `with` a method or a model.
"""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "raysim": {},
    "paper": {
        "data": {"client_val_frac": 0.0},
        "model": {"layer_by": "unit"},
        "local": {"state": "reset"},
        "fields": {
            "fedlaw": {"swa_order": "gamma_first"},
            "fedlws": {"tau_clamp": None},
        },
    },
    "official_000": {  # the released code of FedLWS
        "data": {"partition": {"dirichlet_counts": {"min_size": 0}}, "client_val_frac": 0.3},
        "model": {"layer_by": "bias_group"},
        "local": {"batch_size": 128, "state": "persist"},
        "fields": {
            "feddisco": {"a": 0.1, "b": 0.1},
            "fedlws": {"beta": 0.03, "tau_clamp": [0.01, 0.2], "lws_stats": "all", "shrink_buffers": True},
        },
        "with": {  # of a ViT the code closes a layer at the end of a block, not at every bias
            "vit": {
                "model": {
                    "layer_by": "block",
                    "blocks": [
                        r"^(embed|block0)\.",
                        *(rf"^block{i}\." for i in range(1, 5)),
                        r"^block5\.(?!norm)",
                        r"^block5\.norm",
                        r"^head\.",
                    ],
                }
            }
        },
    },
    "official_001": {  # FedALA's code as released today; its scores are those of the best round
        "data": {"client_test_frac": 0.25},
        "model": {"bn_stats": "local"},
        "local": {"batch_size": 10, "drop_last": True},
        "evaluate": {"global": False, "personal": "after_init"},
        "fields": {"fedala": {"tensors": 2, "window": True, "clients": "all", "threshold": 0.1, "drop_last": False}},
    },
    "official_003": {  # the released code of FedLAW
        "data": {"client_val_frac": 0.3},
        "local": {"state": "persist"},
        "fields": {
            "fedprox": {"official_sgd": True},
            "feddyn": {"unsquared": True, "weights": "size"},
            "server_ft": {"server_ft_official": True},
            "feddf": {"server_ft_official": True},
            "fedbe": {"server_ft_official": True},
        },
        "with": {
            "fedlaw": {"model": {"bn_stats": "proxy"}},
            "attentive_law": {"model": {"bn_stats": "proxy"}},
            "adaptive_gws": {"model": {"bn_stats": "proxy"}},
        },
    },
}
