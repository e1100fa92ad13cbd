"""The model families that mpu supports. To add one, put its table into one of these modules, its name into the list at
the end of that, and its config into tests/helpers/models.py, and run `mpu check-family` on a checkpoint of it.

What holds in which family was read from transformers' modelling code and is checked on small random models
(tests/model/test_families.py).
"""

from __future__ import annotations

from mpu_cli.model.families import gemma, hybrids, latent, layernorm, llama, mixtures

_ALL = (*llama.ALL, *gemma.ALL, *mixtures.ALL, *latent.ALL, *hybrids.ALL, *layernorm.ALL)
FAMILIES = {model_type: family for family in _ALL for model_type in family.model_types}
