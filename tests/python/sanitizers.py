"""What a test must know of the sanitizer that it runs under (scripts/pytest_asan.sh)."""

from __future__ import annotations

import os

# Its malloc fills what it gives, so that memory that nobody wrote looks as if somebody had.
UNDER_ASAN = "libasan" in os.environ.get("LD_PRELOAD", "")
