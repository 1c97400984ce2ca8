"""Values as programs read them: strict JSON, in which there is no nan."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(value: Any) -> str:
    """Indented JSON; what was logged may be nan or infinite, which becomes null: jq and others refuse such words."""
    try:
        return json.dumps(value, indent=1, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=1)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, (list, tuple)) else value
