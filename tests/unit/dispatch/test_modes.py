"""Each mode on a list-like batch: what goes to which rank, and how results come back."""

from dataclasses import dataclass, field

import pytest

from rpcrl.batch.splittable import bounds
from rpcrl.dispatch.mode import (
    Arguments,
    CallShape,
    Dispatch,
    DispatchMode,
    Mesh,
    current,
    custom_mode,
    mesh,
    register_dispatch_mode,
    update_dispatch_mode,
)
from rpcrl.dispatch.splitting import unpad_result
from rpcrl.errors import CollectError, DispatchError


class Rows(list):
    """The smallest batch: len, slices, chunk and concat."""

    def chunk(self, parts: int, *, uneven: bool = False) -> list["Rows"]:
        return [self[start:stop] for start, stop in bounds(len(self), parts, uneven=uneven)]

    @staticmethod
    def concat(parts: list["Rows"]) -> "Rows":
        return Rows([row for part in parts for row in part])

    def __getitem__(self, index):
        value = super().__getitem__(index)
        return Rows(value) if isinstance(index, slice) else value


@dataclass
class Group:
    world_size: int
    meshes: dict[str, Mesh] = field(default_factory=dict)

    def mesh(self, name: str) -> Mesh:
        return self.meshes[name]


def send(mode: DispatchMode, world_size: int, *args, call: CallShape | None = None, **kwargs):
    return mode.dispatch(Group(world_size), call or CallShape("role.m"), Arguments(args, kwargs))


def test_one_to_all_gives_the_same_object_so_that_it_is_encoded_once():
    sent = send(Dispatch.ONE_TO_ALL, 3, 1, x=2)
    assert len({id(part) for part in sent.per_rank}) == 1
    assert len(sent.per_rank) == 3


@pytest.mark.parametrize("mode", [Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE])
def test_one_value_per_rank(mode):
    sent = send(mode, 2, [1, 2], y=("a", "b"))
    assert [(part.args, part.kwargs) for part in sent.per_rank] == [((1,), {"y": "a"}), ((2,), {"y": "b"})]
    with pytest.raises(DispatchError, match="argument 1 has 3 values for 2 ranks"):
        send(mode, 2, [1, 2, 3])
    with pytest.raises(DispatchError, match=r"y must be a list or tuple of 2 values, got int.*ONE_TO_ALL"):
        send(mode, 2, y=5)


@pytest.mark.parametrize("mode", [Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO])
def test_a_list_of_world_size_is_a_value_like_any_other(mode):
    assert all(part.args == ([1, 2],) for part in send(mode, 2, [1, 2]).per_rank)


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("policy", ["pad", "uneven"])
def test_split_echo_collect_is_the_identity(world_size, policy):
    for num_rows in range(41):
        if num_rows == 0 and policy == "pad" and world_size > 1:
            continue
        batch = Rows(range(num_rows))
        sent = send(Dispatch.DP_COMPUTE_PROTO, world_size, batch, call=CallShape("r.m", policy))
        parts = [part.args[0] for part in sent.per_rank]
        assert len(parts) == world_size
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= (1 if policy == "uneven" else 0)
        back = Dispatch.DP_COMPUTE_PROTO.collect(Group(world_size), CallShape("r.m"), parts)
        assert unpad_result(back, sent.num_padding, sum(sizes), call="r.m") == batch
        assert batch == Rows(range(num_rows)), "the caller's batch is as it was"


def test_zero_rows_split_into_empty_parts():
    sent = send(Dispatch.DP_COMPUTE_PROTO, 3, Rows())
    assert [part.args[0] for part in sent.per_rank] == [[], [], []]
    assert sent.num_padding == 0


def test_the_error_policy_shows_the_numbers():
    with pytest.raises(DispatchError, match=r"cannot split 60 rows into 8 equal parts for r\.m.*4 rows are left over"):
        send(Dispatch.DP_COMPUTE_PROTO, 8, Rows(range(60)), call=CallShape("r.m", "error"))


def test_batches_of_different_length_and_non_batches_are_refused():
    with pytest.raises(DispatchError, match="argument 1 has 2, other has 3 rows"):
        send(Dispatch.DP_COMPUTE_PROTO, 1, Rows(range(2)), other=Rows(range(3)))
    with pytest.raises(DispatchError, match="argument 2 is a int, which has no len"):
        send(Dispatch.DP_COMPUTE_PROTO, 1, Rows(range(2)), 7)
    with pytest.raises(DispatchError, match="was called without one"):
        send(Dispatch.DP_COMPUTE_PROTO, 1)


def test_a_result_that_is_no_batch_names_its_rank():
    with pytest.raises(CollectError, match="rank 1 returned NoneType"):
        Dispatch.DP_COMPUTE_PROTO.collect(Group(2), CallShape("r.m"), [Rows([1]), None])


def test_padding_is_never_guessed_off_a_result_of_another_length():
    with pytest.raises(CollectError, match=r"8 rows \(3 of them padding\) and returned 5"):
        unpad_result(Rows(range(5)), 3, 8, call="r.m")


def test_custom_modes_have_verls_signature():
    mode = custom_mode(
        {
            "dispatch_fn": lambda group, x: (([x] * group.world_size,), {}),
            "collect_fn": lambda group, outputs: sum(outputs),
        }
    )
    assert [part.args for part in send(mode, 3, 5).per_rank] == [(5,)] * 3
    assert mode.collect(Group(3), CallShape("r.m"), [1, 2, 3]) == 6
    with pytest.raises(DispatchError, match="missing: collect_fn"):
        custom_mode({"dispatch_fn": print})


TP2_DP2 = Mesh("m", dp_ranks=(0, 0, 1, 1), collects=(True, False, True, False))
PP2_TP2_DP2 = Mesh("m", dp_ranks=(0, 0, 1, 1, 0, 0, 1, 1), collects=(False,) * 4 + (False, True, False, True))
DP_BACKWARDS = Mesh("m", dp_ranks=(1, 0), collects=(True, True))


@pytest.mark.parametrize("shape", [TP2_DP2, PP2_TP2_DP2, DP_BACKWARDS])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6])
def test_a_mesh_splits_once_per_dp_rank_and_collects_in_dp_order(shape: Mesh, num_rows: int):
    group = Group(len(shape.dp_ranks), {"m": shape})
    mode, batch = mesh("m"), Rows(range(num_rows))
    sent = mode.dispatch(group, CallShape("r.m"), Arguments((), {"data": batch}))
    assert len(sent.per_rank) == len(shape.dp_ranks)
    assert len({id(part) for part in sent.per_rank}) == shape.dp_size, "ranks of one dp rank share one object"
    outputs = [
        part.kwargs["data"] if counts else None for part, counts in zip(sent.per_rank, shape.collects, strict=True)
    ]
    back = mode.collect(group, CallShape("r.m"), outputs)
    assert unpad_result(back, sent.num_padding, sent.num_rows, call="r.m") == batch


@pytest.mark.parametrize("collects", [(True, True, True, False), (False, False, True, False)])
def test_a_mesh_needs_one_collecting_rank_for_each_dp_rank(collects: tuple[bool, ...]):
    with pytest.raises(DispatchError, match=r"mesh 'm': each of its 2 dp ranks needs exactly one rank that collects"):
        Mesh("m", (0, 0, 1, 1), collects)


def test_a_function_goes_to_every_rank_and_the_batch_is_split():
    sent = send(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, 2, len, Rows(range(3)))
    assert [part.args[0] for part in sent.per_rank] == [len, len]
    assert [list(part.args[1]) for part in sent.per_rank] == [[0, 1], [2, 0]]
    assert (sent.num_padding, sent.num_rows) == (1, 4)
    with pytest.raises(DispatchError, match="takes a function first and then batches, got Rows"):
        send(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, 2, Rows(range(3)))


def test_a_direct_rollout_method_is_not_called_by_the_group():
    with pytest.raises(DispatchError, match="the rollout is called directly"):
        send(Dispatch.DIRECT_ROLLOUT_METHOD, 2)


def test_modes_can_be_looked_up_searched_and_walked():
    names = [mode.name for mode in Dispatch]
    assert len(Dispatch) == len(names) == len(set(names))
    assert Dispatch["ONE_TO_ALL"] is Dispatch.ONE_TO_ALL
    assert "DP_COMPUTE" in Dispatch
    assert Dispatch.DP_COMPUTE in Dispatch
    assert "NO_SUCH" not in Dispatch
    with pytest.raises(DispatchError, match="no dispatch mode 'NO_SUCH'; there are: ONE_TO_ALL"):
        Dispatch["NO_SUCH"]


def test_a_mode_of_your_own_is_registered_and_updated_for_groups_to_come():
    def twice(group, x):
        return ([x] * group.world_size,), {}

    mode = register_dispatch_mode("my_mode", twice, lambda group, outputs: outputs)
    try:
        assert Dispatch["MY_MODE"] is mode
        with pytest.raises(DispatchError, match="'MY_MODE' is registered already"):
            register_dispatch_mode("my_mode", twice, lambda group, outputs: outputs)
        update_dispatch_mode(mode, twice, lambda group, outputs: max(outputs))
        assert mode.collect(Group(2), CallShape("r.m"), [1, 2]) == [1, 2], "who holds the old one keeps it"
        assert current(mode).collect(Group(2), CallShape("r.m"), [1, 2]) == 2
    finally:
        del Dispatch.MY_MODE  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_padding_never_reaches_a_metric(world_size: int):
    sent = send(Dispatch.DP_COMPUTE_METRIC, world_size, Rows(["a", "b", "c"]))
    parts = [part.args[0] for part in sent.per_rank]
    assert len(parts) == world_size
    assert Rows.concat(parts) == ["a", "b", "c"]
    assert sent.num_padding == 0


def test_a_metric_mode_refuses_a_remainder_when_the_method_does():
    with pytest.raises(DispatchError, match="3 rows into 2 equal parts"):
        send(Dispatch.DP_COMPUTE_METRIC, 2, Rows("abc"), call=CallShape("role.m", uneven="error"))
