"""The model families that mpu supports. To add one, put its table into one of these modules and its config into
tests/helpers/models.py, and run `mpu check-family` on a checkpoint of it.

What holds in which family was read from transformers' modelling code and is checked on small random models
(tests/model/test_families.py).
"""

from __future__ import annotations

from mpu_cli.model.families import gemma, hybrids, latent, layernorm, llama, mixtures
from mpu_cli.model.family import Family

_INSIDE = ("muse_glimmer_text", "mistral4")  # of which there are no models without a wrapper
FAMILIES: dict[str, Family] = {}
for _module in (llama, gemma, mixtures, latent, hybrids, layernorm):
    for _table in vars(_module).values():
        if isinstance(_table, Family):
            FAMILIES |= {name: _table for name in _table.model_types if name not in _INSIDE}
