# Tests import `eager_twin` and `benchmarks/corpus_*` by plain name.
import pathlib
import sys

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(_ROOT / "tests" / "python"), str(_ROOT / "tests" / "soundness"), str(_ROOT / "benchmarks")]
