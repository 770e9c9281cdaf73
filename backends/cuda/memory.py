"""The one buffer of a rank, and the cache of every layer in it, by name and in the model's order."""

from collections.abc import Callable, Mapping, Sequence

import torch

from ...core.errors import InputError, MisuseError
from ...core.planner.layout import KVCacheConfig
from .layout import CacheArrangement, LayerCache, bind_layers, layer_caches


class CacheMemory:
    """Allocated once, for one plan."""

    def __init__(
        self,
        device: torch.device,
        arrangement: CacheArrangement,
        kernel_block_sizes: Sequence[int | None] | None,
    ) -> None:
        """Nothing is allocated yet; see `CudaBackend` for the arguments."""
        self._device = device
        self._arrangement = arrangement
        self._kernel_block_sizes = kernel_block_sizes
        self._config: KVCacheConfig | None = None
        self._raw: torch.Tensor | None = None
        self._caches: list[LayerCache] = []
        self._layers: dict[str, LayerCache] = {}

    def allocate(self, config: KVCacheConfig, prepare: Callable[[Sequence[LayerCache]], None]) -> None:
        """Make the buffer, zeroed, and its caches.

        Args:
            config: the plan.
            prepare: does what the caches need; what it raises leaves this without memory, as before.

        Raises:
            InputError: the arrangement does not fit the plan's layout or specs, or a kernel block size does not divide.
            MisuseError: it is there already.
        """
        if self._config is not None:
            raise MisuseError("this backend has its memory already; make another one for another plan")
        raw = torch.zeros(config.size_bytes, dtype=torch.int8, device=self._device)
        caches = layer_caches(raw, config, self._arrangement, self._kernel_block_sizes)
        prepare(caches)
        self._raw, self._caches, self._config = raw, caches, config
        self._layers = {cache.name: cache for cache in caches}

    @property
    def config(self) -> KVCacheConfig:
        """The plan that it was allocated for.

        Raises:
            MisuseError: it is not there yet.
        """
        if self._config is None:
            raise MisuseError("the backend has no memory for a pool yet; call initialize first")
        return self._config

    @property
    def raw(self) -> torch.Tensor:
        """The buffer: int8 `[size_bytes]`.

        Raises:
            MisuseError: it is not there yet.
        """
        if self._raw is None:
            raise MisuseError("the backend has no memory yet; call initialize first")
        return self._raw

    @property
    def caches(self) -> Sequence[LayerCache]:
        """One a layer of the plan; none before `allocate`."""
        return self._caches

    @property
    def layers(self) -> Mapping[str, LayerCache]:
        """Layer name -> its cache."""
        return self._layers

    def bind(
        self, layer_names: Sequence[str], shared_layers: dict[str, str] | None
    ) -> tuple[list[LayerCache], dict[str, LayerCache]]:
        """The caches in the order of the model's layers, and by name; see `bind_layers`."""
        in_order, self._layers = bind_layers(self._caches, layer_names, shared_layers)
        return in_order, self._layers

    def layer(self, name: str) -> LayerCache:
        """The cache of a layer.

        Raises:
            InputError: there is no such layer on this rank.
        """
        cache = self._layers.get(name)
        if cache is None:
            raise InputError(f"no layer {name!r} on this rank; it has {', '.join(self._layers) or 'none'}")
        return cache

    def of_group(self, group: int) -> LayerCache:
        """The cache of some layer of a group.

        Raises:
            InputError: the group has none on this rank.
        """
        cache = next((cache for cache in self._caches if cache.group == group), None)
        if cache is None:
            raise InputError(f"group {group} has no layer on this rank, so nothing reads its tables here")
        return cache
