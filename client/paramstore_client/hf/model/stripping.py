"""A model class whose experts never become parameters: optimizers, DDP, FSDP and state dicts see nothing of them.

Where a parameter was, a meta tensor stands as a plain attribute: `_init_weights` of the models writes into it, which does nothing,
and its shape can still be seen. The class keeps its name and module, by which transformers finds its conversions, its loss and the
`architectures` of a saved config.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from torch import nn

from paramstore.errors import ConfigError
from paramstore_client.hf.compat import modeling
from paramstore_client.hf.model import module_list
from paramstore_client.hf.model.layout import STRIPPED, experts_modules, stacked_tensors


def stripped_class(model_class: type[Any]) -> type[Any]:
    """A subclass of `model_class` whose instances are stripped as soon as they are built."""

    class Stripped(model_class):  # type: ignore[misc]  # the class is known at run time only
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            modeling.expect_keys(self, strip(self))

        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            return _Blank(type(self)), (), self.__dict__

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Stripped, name, getattr(model_class, name))
    return Stripped


class Unpicklable:
    """Refuses to be pickled, and so does a model that refers to it: what is loaded would have no experts."""

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a model with stored experts cannot be pickled: save_pretrained keeps its dense part")


class _Blank(Unpicklable):
    """Makes the empty model that a copy begins with."""

    def __init__(self, model_class: Any) -> None:
        self._class = model_class

    def __call__(self) -> Any:
        return self._class.__new__(self._class)


def strip(model: nn.Module) -> list[str]:
    """Takes the experts' parameters out of `model`; returns patterns of the checkpoint keys that are theirs."""
    patterns = []
    for path, module in experts_modules(model).items():
        if module_list.is_container(module):
            module_list.strip_container(module)
        else:
            _strip_stacked(module)
        patterns.append(re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(_below_prefix(path))) + r"\.")
    return sorted(set(patterns))


def _strip_stacked(module: nn.Module) -> None:
    names = tuple(stacked_tensors(module))
    for name in names:
        parameter = module._parameters.pop(name)
        assert parameter is not None, f"{name} was listed as a parameter"
        module.__dict__[name] = parameter.detach().to("meta")
    module.__dict__[STRIPPED] = names


def _below_prefix(path: str) -> str:
    """The path without what a base or a composite model puts before its layers: checkpoints differ there."""
    numbered = re.search(r"\w+\.\d+\.", path)
    return path if numbered is None else path[numbered.start() :]
