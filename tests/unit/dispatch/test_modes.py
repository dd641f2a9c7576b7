"""Each mode on a list-like batch: what goes to which rank, and how results come back."""

from dataclasses import dataclass

import pytest

from rpcrl.batch.splittable import bounds
from rpcrl.dispatch.mode import Arguments, CallShape, Dispatch, DispatchMode, custom_mode
from rpcrl.dispatch.splitting import unpad_result
from rpcrl.errors import DispatchError


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
    with pytest.raises(DispatchError, match="rank 1 returned NoneType"):
        Dispatch.DP_COMPUTE_PROTO.collect(Group(2), CallShape("r.m"), [Rows([1]), None])


def test_padding_is_never_guessed_off_a_result_of_another_length():
    with pytest.raises(DispatchError, match=r"8 rows \(3 of them padding\) and returned 5"):
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
