"""Every command that asks a daemon takes its store in one way."""

from __future__ import annotations

ADDRESS_HELP = "The daemon's unix:///path, or its store's directory; default $PARAMSTORE_ADDRESS, else paramstore-data."
