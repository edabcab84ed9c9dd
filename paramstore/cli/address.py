"""The one way in which every command that asks a daemon is told its store."""

from __future__ import annotations

ADDRESS_HELP = "The daemon's unix:///path, or its store's directory; default $PARAMSTORE_ADDRESS, else paramstore-data."
