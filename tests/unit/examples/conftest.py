import sys
from pathlib import Path

# The examples import each other as scripts do: from their own directory.
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
