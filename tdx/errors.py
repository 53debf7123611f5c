"""Every exception tdx raises; see tdx.runtime.errors."""

from __future__ import annotations

from tdx.runtime.errors import *  # noqa: F403
from tdx.runtime.errors import __all__ as __all__
