"""The real models of the demo, for the tests; `pythonpath` in pyproject.toml makes `examples` importable."""

from real_models import minilm as minilm
from real_models import smollm2 as smollm2
