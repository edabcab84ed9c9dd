"""paramstore: a storage-tier parameter service for Mixture-of-Experts models.

`import paramstore as ps` is what users type. The public names live in the thin client
`paramstore_client` and are resolved on first use (PEP 562), so that `paramstore --help` and the
daemon's decision layers never import torch.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # type checkers know this name; importing `typing` for it would delay every command
if TYPE_CHECKING:
    from paramstore_client import *  # noqa: F403


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    import paramstore_client as client

    if name in client.__all__:
        return getattr(client, name)
    raise AttributeError(f"module 'paramstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    import paramstore_client as client

    return sorted([*globals(), *client.__all__])
