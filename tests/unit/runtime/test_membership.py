"""The table of groups: the READY barrier, and what breaks a group."""

from rpcrl.runtime.membership import Group, GroupState, Member, Membership
from rpcrl.wire.messages import Hello, WorkerExited


def hello(rank: int, incarnation: str = "i") -> Hello:
    return Hello("worker", f"w{rank}", incarnation, "host", 100 + rank, "boot")


def ended(rank: int, **fields: object) -> WorkerExited:
    values = {"exit_code": None, "signal": "SIGKILL", "peak_rss_bytes": 1, "out_of_memory": False} | fields
    return WorkerExited(f"w{rank}", "host", 100 + rank, last_lines=(), log_path="/log", **values)  # type: ignore[arg-type]


def two_ranks() -> tuple[Membership, Group]:
    membership = Membership()
    group = Group("g", [Member(f"w{rank}", "i", rank, ("actor",)) for rank in range(2)])
    membership.expect(group)
    return membership, group


def test_welcome_comes_after_the_last_hello_and_ready_after_the_last_ready():
    membership, group = two_ranks()
    assert membership.on_hello(hello(0)) is None
    assert membership.on_ready("w1") is None, "ready before hello counts for nothing"
    assert membership.on_hello(hello(1, incarnation="of another life")) is None
    assert membership.on_hello(hello(1)) is group
    assert membership.on_hello(hello(1)) is None, "a second hello changes nothing"
    assert membership.on_ready("w0") is None
    assert "rank 1, pid 101 has said hello" in group.missing()
    assert membership.on_ready("w1") is group
    assert group.state is GroupState.READY


def test_the_first_end_breaks_the_group_and_names_rank_role_and_signal():
    membership, group = two_ranks()
    assert membership.on_exit(ended(1)) is group
    assert membership.on_exit(ended(1)) is None
    assert group.state is GroupState.BROKEN
    assert (group.exits[0].rank, group.exits[0].roles, group.exits[0].signal) == (1, ("actor",), "SIGKILL")
    assert group.alive == ("w0",)
    assert membership.on_exit(ended(9)) is None


def test_what_is_left_of_a_group_is_named_by_rank_and_pid():
    membership, _ = two_ranks()
    membership.on_hello(hello(1))
    assert membership.left_of("g") == "rank 0 (pid not known), rank 1 (pid 101)"
    membership.on_exit(ended(0))
    assert membership.left_of("g") == "rank 1 (pid 101)"
    membership.on_exit(ended(1))
    assert membership.left_of("g") == membership.left_of("no such group") == "none"


def test_a_start_error_is_no_exit():
    membership, group = two_ranks()
    membership.on_exit(ended(0, start_error="no such module"))
    assert group.exits == []
    assert group.start_errors == ["rank 0: no such module"]
