"""The comparison of simulated and real memory can fail: it finds each of these faults of a backend.

Histories come from seeds, the same on every machine, so that a fault is found or not found once and for all.
"""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="real memory needs torch")

from kvledger.backends.cuda import layout as cache_place  # noqa: E402
from kvledger.backends.cuda import tables as device_tables  # noqa: E402
from kvledger.backends.cuda.layer_access import LayerAccess  # noqa: E402
from kvledger.backends.cuda.layout import CacheArrangement  # noqa: E402
from kvledger.backends.cuda.staging import StepStaging  # noqa: E402
from kvledger.backends.cuda.tables import DeviceTables  # noqa: E402
from kvledger.core.events import FreeReason  # noqa: E402
from kvledger.core.planner.layout import KVCacheLayout  # noqa: E402
from kvledger.kernels import reshape_and_cache  # noqa: E402
from kvledger.kernels.torch_kernels import TorchKernels  # noqa: E402
from kvledger.testing import KitFailure, LedgerAdapter, Scenario, ledger_supports  # noqa: E402
from kvledger.testing.choices import RandomChooser, choose_scenario  # noqa: E402

from tests.properties.same_slots import SameSlots, SlotMismatchError, Variant  # noqa: E402
from tests.properties.slot_histories import play_commands, play_engine  # noqa: E402

pytestmark = pytest.mark.torch

BUDGET_HISTORIES = 60
VARIANTS = (
    Variant(KVCacheLayout.BLNHC),
    Variant(KVCacheLayout.LBNHC, CacheArrangement.FLASH_NHD),
    Variant(KVCacheLayout.BLHNC, splits=2, dtype="fp8_e4m3"),
)

Patch = pytest.MonkeyPatch
FAULTS: dict[str, Callable[[Patch], None]] = {}


def fault(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Register a fault under the words of its name."""
    FAULTS[function.__name__] = function
    return function


class _NoCopies:
    """Loses every copy that it is given."""

    def __bool__(self) -> bool:
        return False

    def add(self, group: int, source: int, target: int) -> None:
        pass

    def take(self) -> list[Any]:
        return []


@fault
def a_copy_on_write_is_forgotten(patch: Patch) -> None:
    made = DeviceTables.__init__

    def init(self: DeviceTables, *arguments: Any, **settings: Any) -> None:
        made(self, *arguments, **settings)
        self.copies = _NoCopies()

    patch.setattr(DeviceTables, "__init__", init)


@fault
def a_copy_goes_the_wrong_way(patch: Patch) -> None:
    copy = TorchKernels.copy_blocks
    patch.setattr(
        TorchKernels,
        "copy_blocks",
        lambda self, *, caches, sources, targets: copy(self, caches=caches, sources=targets, targets=sources),
    )


@fault
def blocks_are_copied_after_the_steps_writes(patch: Patch) -> None:
    upload_now = DeviceTables.upload

    def upload(self: DeviceTables, batch: Any, kernels: Any) -> None:
        held, self.copies = self.copies, _NoCopies()
        upload_now(self, batch, kernels)
        self.copies = held
        if batch is not None and not batch.num_tokens:
            upload_now(self, batch, kernels)

    patch.setattr(DeviceTables, "upload", upload)


@fault
def only_the_first_layer_is_copied(patch: Patch) -> None:
    regions = device_tables.BlockRegions.of
    patch.setattr(device_tables.BlockRegions, "of", staticmethod(lambda caches: regions(caches[:1])))


@fault
def a_truncated_row_is_skipped(patch: Patch) -> None:
    def cut(self: DeviceTables, group: int, row: int, num_blocks: int) -> None:
        self.host_tables[group][row, num_blocks : self.num_blocks_per_row[group][row]] = 0
        self.num_blocks_per_row[group][row] = num_blocks

    patch.setattr(DeviceTables, "_cut", cut)


@fault
def a_truncated_row_grows_behind_its_old_end(patch: Patch) -> None:
    cut = DeviceTables._cut

    def keep_the_end(self: DeviceTables, group: int, row: int, num_blocks: int) -> None:
        end = int(self.num_blocks_per_row[group][row])
        cut(self, group, row, num_blocks)
        self.num_blocks_per_row[group][row] = end if num_blocks else 0

    patch.setattr(DeviceTables, "_cut", keep_the_end)


@fault
def what_fell_out_of_the_window_stays_in_the_table(patch: Patch) -> None:
    free = DeviceTables._on_freed
    patch.setattr(
        DeviceTables,
        "_on_freed",
        lambda self, event: free(self, event) if event.reason is not FreeReason.OUT_OF_WINDOW else None,
    )


@fault
def an_entry_that_changed_twice_gets_its_older_value(patch: Patch) -> None:
    put = DeviceTables._put

    def remember(self: DeviceTables, group: int, indices: Any, blocks: Any) -> None:
        older = self.__dict__.setdefault("older", {})
        put(self, group, indices, blocks)
        for index in indices.tolist():
            older.setdefault((group, index), int(self.host_tables[group].reshape(-1)[index]))

    taken = DeviceTables._take_changes

    def take_changes(self: DeviceTables, group: int) -> tuple[Any, Any]:
        indices, blocks = taken(self, group)
        older = self.__dict__.get("older", {})
        values = [
            older.pop((group, index), block) for index, block in zip(indices.tolist(), blocks.tolist(), strict=True)
        ]
        return indices, np.array(values, dtype=np.int32)

    patch.setattr(DeviceTables, "_put", remember)
    patch.setattr(DeviceTables, "_take_changes", take_changes)


@fault
def a_transfer_starts_before_its_staging_buffer_is_written(patch: Patch) -> None:
    send = StepStaging.send

    def early(self: StepStaging, arrays: Any) -> Any:
        host = self._host[self.num_transfers % len(self._host)]
        stale = host.memory.clone()
        sent = send(self, arrays)
        self._device[self._header_bytes :].copy_(stale[self._header_bytes :])
        return sent

    patch.setattr(StepStaging, "send", early)


@fault
def a_batch_is_sent_a_step_late(patch: Patch) -> None:
    set_batch = StepStaging.set_batch

    def late(self: StepStaging, batch: Any) -> None:
        set_batch(self, self.__dict__.get("next_batch", batch))
        self.__dict__["next_batch"] = batch

    patch.setattr(StepStaging, "set_batch", late)


@fault
def positions_are_off_by_one(patch: Patch) -> None:
    set_batch = StepStaging.set_batch

    def shifted(self: StepStaging, batch: Any) -> None:
        set_batch(self, attrs.evolve(batch, first_positions=batch.first_positions + 1))

    patch.setattr(StepStaging, "set_batch", shifted)


@fault
def the_tail_of_a_padded_batch_gets_slot_0(patch: Patch) -> None:
    compute = TorchKernels.compute_slot_mapping

    def pads_with_zero(self: TorchKernels, **arguments: Any) -> None:
        compute(self, **arguments)
        num_tokens = int(arguments["query_start_loc"][-1])
        arguments["slot_mapping"][:, num_tokens:] = 0

    patch.setattr(TorchKernels, "compute_slot_mapping", pads_with_zero)


@fault
def every_group_uses_the_block_size_of_the_first(patch: Patch) -> None:
    made = device_tables.SlotTables.of
    patch.setattr(
        device_tables.SlotTables,
        "of",
        staticmethod(lambda tables, sizes, **settings: made(tables, sizes[:1] * len(sizes), **settings)),
    )


@fault
def keys_and_values_change_places(patch: Patch) -> None:
    write = TorchKernels.reshape_and_cache
    patch.setattr(
        TorchKernels,
        "reshape_and_cache",
        lambda self, *, key, value, **where: write(self, key=value, value=key, **where),
    )


@fault
def the_scales_of_keys_and_values_change_places(patch: Patch) -> None:
    scales_for = LayerAccess._scales_for
    patch.setattr(LayerAccess, "_scales_for", lambda self, cache, dtype: scales_for(self, cache, dtype)[::-1])


@fault
def all_layers_use_the_scales_of_the_first(patch: Patch) -> None:
    scales_for = LayerAccess._scales_for

    def of_the_first(self: LayerAccess, cache: Any, dtype: Any) -> Any:
        first = self.__dict__.setdefault("first", cache)
        return scales_for(self, first if first.key.dtype == cache.key.dtype else cache, dtype)

    patch.setattr(LayerAccess, "_scales_for", of_the_first)


@fault
def numbers_are_multiplied_by_the_scale_that_they_are_divided_by(patch: Patch) -> None:
    quantized = reshape_and_cache.quantize
    patch.setattr(
        reshape_and_cache,
        "quantize",
        lambda values, dtype, scale: quantized(values, dtype, None if scale is None else 1 / scale),
    )


@fault
def two_layers_change_places(patch: Patch) -> None:
    offset = cache_place.LayerPlace.offset_bytes
    patch.setattr(
        cache_place.LayerPlace, "offset_bytes", lambda self, index: offset(self, len(self.tensor.layers) - 1 - index)
    )


@fault
def a_prefix_hit_is_not_mirrored(patch: Patch) -> None:
    patch.setattr(DeviceTables, "_on_adopted", lambda self, event: None)


@fault
def a_child_gets_no_table(patch: Patch) -> None:
    patch.setattr(DeviceTables, "_on_shared", lambda self, event: None)


def histories() -> Iterator[Callable[[], None]]:
    """The same histories for every fault: two of commands for each one of an engine's steps."""

    def witness(scenario: Scenario, ledger: LedgerAdapter) -> SameSlots:
        return SameSlots(scenario.groups, ledger.log.created, VARIANTS)

    def play(seed: int) -> None:
        chooser = RandomChooser(seed)
        scenario = choose_scenario(chooser, ledger_supports())
        if seed % 3:
            play_commands(chooser, scenario, witness, 25)
        else:
            play_engine(chooser, scenario, witness, 25)

    for seed in range(BUDGET_HISTORIES):
        yield lambda seed=seed: play(seed)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", FAULTS)
def test_the_comparison_finds_that(name: str, monkeypatch: Patch) -> None:
    FAULTS[name](monkeypatch)
    with pytest.raises((KitFailure, SlotMismatchError)) as found:
        for history in histories():
            history()
    if isinstance(found.value, KitFailure):
        assert found.value.violation.name == "same_memory"


def test_without_a_fault_it_finds_nothing() -> None:
    for history in histories():
        history()
