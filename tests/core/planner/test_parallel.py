import pytest
from kvledger.core.errors import InputError
from kvledger.core.planner.parallel import (
    kv_heads_per_rank,
    layers_per_stage,
    tensor_parallel_layers,
    tensor_parallel_spec,
)
from kvledger.core.planner.specs import FullAttentionSpec, MambaLikeSpec, MLASpec, OpaqueSpec, StateArray


def test_latents_and_opaque_formats_are_stored_whole_by_every_rank() -> None:
    for spec in (
        MLASpec(block_size=64, head_size=576, dtype="bf16"),
        OpaqueSpec(block_size=64, opaque_bytes_per_token=656),
    ):
        assert tensor_parallel_spec(spec, 8) == spec


def test_a_state_is_divided_along_its_tensor_parallel_axis() -> None:
    spec = MambaLikeSpec(block_size=16, states=(StateArray((64, 128), "fp32", tp_axis=0), StateArray((3, 10), "bf16")))
    shard = tensor_parallel_spec(spec, 4)
    assert isinstance(shard, MambaLikeSpec)
    assert [array.shape for array in shard.states] == [(16, 128), (3, 10)]
    with pytest.raises(InputError, match="does not divide axis 0"):
        tensor_parallel_spec(spec, 3)


def test_an_error_of_a_layer_names_the_layer() -> None:
    layers = {"model.layers.7": FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bf16")}
    with pytest.raises(InputError, match=r"layer model.layers.7.*neither divides.*1, 2, 4, 8, 16"):
        tensor_parallel_layers(layers, 3)


@pytest.mark.parametrize(
    ("num_layers", "stages", "expected"),
    [(80, 2, (40, 40)), (62, 4, (15, 16, 16, 15)), (61, 4, (15, 15, 16, 15)), (7, 4, (2, 2, 2, 1)), (5, 1, (5,))],
)
def test_left_over_layers_go_to_the_stages_before_the_last(
    num_layers: int, stages: int, expected: tuple[int, ...]
) -> None:
    assert layers_per_stage(num_layers, stages) == expected


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InputError, match="1 to 3"):
        layers_per_stage(3, 4)


def test_one_head_is_replicated_over_more_ranks_than_heads() -> None:
    assert [kv_heads_per_rank(8, size) for size in (1, 2, 4, 8, 16, 32)] == [8, 4, 2, 1, 1, 1]
