"""The clients beside the tests are importable however pytest imports test modules."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
