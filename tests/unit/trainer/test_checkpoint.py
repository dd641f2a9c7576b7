import json

import pytest

from rpcrl.engines.shard_files import describe_files, verify_files
from rpcrl.errors import CheckpointError
from rpcrl.trainer.checkpoint import CheckpointStore, Manifest, check_world, read_manifest


def save(store, step, content=b"weights"):
    directory = store.begin(step)
    shard = directory / "actor" / "rank_0" / "model.safetensors"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(content)
    entry = {"rank": 0, "files": describe_files(directory, [shard])}
    return store.publish(
        Manifest(step=step, world={"actor": 1}, ranks={"actor": [entry]}, weight_version=step, data={"index": step})
    )


def test_what_is_published_is_read_back(tmp_path):
    store = CheckpointStore(tmp_path)
    path = save(store, 3)
    manifest = read_manifest(path)
    assert (manifest.step, manifest.weight_version, manifest.data) == (3, 3, {"index": 3})
    assert store.latest() == path
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["global_step_3", "latest_checkpointed_iteration.txt"]


def test_what_was_begun_but_not_published_does_not_count(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (store.begin(2) / "half").write_text("x")
    assert store.steps() == [1]
    assert store.latest() == store.path(1)
    save(store, 3)
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")], "leftovers go with the next save"


def test_only_the_last_k_stay(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert store.steps() == [3, 4]


def test_steps_of_a_future_that_was_left_go_first(tmp_path):
    for step in (4, 10):
        save(CheckpointStore(tmp_path), step)
    save(CheckpointStore(tmp_path, keep=2), 5)
    assert CheckpointStore(tmp_path).steps() == [4, 5]


def test_keep_below_one_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="max_actor_ckpt_to_keep=0"):
        CheckpointStore(tmp_path, keep=0)


def test_a_step_that_is_written_again_replaces_the_old_one(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1, b"old")
    path = save(store, 1, b"new")
    assert (path / "actor/rank_0/model.safetensors").read_bytes() == b"new"
    verify_files(path, read_manifest(path).ranks["actor"][0]["files"])


def test_the_pointer_decides_and_a_dangling_one_is_passed_over(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    pointer = tmp_path / "latest_checkpointed_iteration.txt"
    assert pointer.read_text() == "2\n"
    pointer.write_text("1\n")
    assert store.latest() == store.path(1)
    pointer.write_text("7\n")
    assert store.latest() == store.path(2)


def test_no_checkpoint(tmp_path):
    assert CheckpointStore(tmp_path / "none").latest() is None
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no manifest\.json"):
        read_manifest(tmp_path)


def test_a_flipped_bit_is_found_and_named(tmp_path):
    path = save(CheckpointStore(tmp_path), 1)
    (path / "actor/rank_0/model.safetensors").write_bytes(b"weighty")
    files = read_manifest(path).ranks["actor"][0]["files"]
    with pytest.raises(CheckpointError, match=r"actor/rank_0/model\.safetensors has SHA-256"):
        verify_files(path, files)


def test_a_short_and_a_missing_file_are_found_before_anything_starts(tmp_path):
    path = save(CheckpointStore(tmp_path), 1)
    shard = path / "actor/rank_0/model.safetensors"
    shard.write_bytes(b"weig")
    with pytest.raises(CheckpointError, match="has 4 bytes, the manifest says 7"):
        read_manifest(path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        read_manifest(path)


def test_another_format_is_refused(tmp_path):
    path = save(CheckpointStore(tmp_path), 1)
    content = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**content, "format": 9}))
    with pytest.raises(CheckpointError, match="has format 9, this version of rpcrl reads format 1"):
        read_manifest(path)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 1, "step": 1, "colour": 2}'])
def test_a_broken_manifest_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read as a manifest"):
        read_manifest(tmp_path)


def test_another_number_of_ranks_is_told_with_both_numbers(tmp_path, caplog):
    path = save(CheckpointStore(tmp_path), 1)
    manifest = read_manifest(path)
    check_world(manifest, {"actor": 1}, directory=path)
    assert not caplog.records
    with caplog.at_level("WARNING", logger="rpcrl"):
        check_world(manifest, {"actor": 4}, directory=path)
    assert "written by 1 ranks of role 'actor', this run has 4" in caplog.text
    with pytest.raises(CheckpointError, match="holds no state of role 'critic'"):
        check_world(manifest, {"critic": 1}, directory=path)
