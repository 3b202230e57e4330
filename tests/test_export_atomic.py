"""What is written appears whole or not at all, and what stood there is never lost."""

import errno
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export import atomic
from export.atomic import atomic_file, atomic_folder, check_output
from export.errors import ArtifactError, OutputExists


def tree(folder) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_folder_appears_when_its_block_ends(tmp_path):
    out = tmp_path / "deep" / "out"
    with atomic_folder(out) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("1")
        assert not out.exists()
    assert tree(tmp_path) == {"deep/out/sub/a": "1"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("force", [False, True])
def test_an_interrupted_write_leaves_everything_as_it_was(error, force, tmp_path):
    if force:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "old").write_text("precious")
        (tmp_path / "file").write_text("precious")
    before = tree(tmp_path)
    for write in (atomic_folder(tmp_path / "out", force), atomic_file(tmp_path / "file", force)):
        with pytest.raises(error), write as temporary:
            (temporary / "a" if temporary.is_dir() else temporary).write_text("half")
            raise error
    assert tree(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == (["file", "out"] if force else [])


def test_an_output_that_exists_is_refused_before_any_work(tmp_path):
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    for name in ("dangling", "empty"):
        for write in (atomic_folder, atomic_file):
            with pytest.raises(OutputExists, match="--force"), write(tmp_path / name):
                pytest.fail("the block ran")
    assert sorted(os.listdir(tmp_path)) == ["dangling", "empty"]


def test_force_replaces_a_folder_a_file_or_a_link(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "a").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_text("old")
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(kept)
    for name in ("folder", "file", "link"):
        with atomic_folder(tmp_path / name, force=True) as folder:
            (folder / "new").write_text(name)
    assert tree(tmp_path) == {"kept/a": "kept", "file/new": "file", "folder/new": "folder", "link/new": "link"}
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "kept", "link"]


@pytest.mark.parametrize("which", [1, 2])
def test_a_swap_that_fails_midway_puts_the_old_one_back(which, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("precious")
    rename, calls = os.rename, []

    def fail(source, target):
        calls.append(target)
        if len(calls) == which:
            raise OSError(errno.EIO, "broken disk")
        rename(source, target)

    monkeypatch.setattr(atomic.os, "rename", fail)
    with pytest.raises(OSError, match="broken disk"), atomic_folder(tmp_path / "out", force=True) as folder:
        (folder / "new").write_text("new")
    assert tree(tmp_path) == {"out/old": "precious"}


def test_a_rival_that_was_faster_is_not_overwritten(tmp_path):
    with pytest.raises(OutputExists), atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("mine")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "a").write_text("theirs")
    assert tree(tmp_path) == {"out/a": "theirs"}


def test_a_full_disk_names_the_output(tmp_path):
    with pytest.raises(OSError, match="No space") as caught, atomic_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_everything_is_on_disk_before_it_appears(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def record_sync(handle):
        events.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def record_rename(source, target):
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(atomic.os, "fsync", record_sync)
    monkeypatch.setattr(atomic.os, "rename", record_rename)
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("1")
    at = events.index("rename")
    assert {str(folder), f"{folder}/sub", f"{folder}/sub/a"} <= set(events[:at])
    assert events[at + 1 :] == [str(tmp_path)]


@pytest.mark.parametrize("out", [".", "..", "../.."])
def test_the_working_folder_is_never_replaced(out, tmp_path, monkeypatch):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    with pytest.raises(ArtifactError, match="working folder"):
        check_output(out, force=True)


@settings(max_examples=25, deadline=None)
@given(old=st.none() | st.binary(max_size=9), new=st.binary(max_size=9), force=st.booleans(), fails=st.booleans())
def test_a_file_holds_the_new_bytes_or_the_old(tmp_path_factory, old, new, force, fails):
    path = tmp_path_factory.mktemp("file") / "report.json"
    if old is not None:
        path.write_bytes(old)
    done = False
    try:
        with atomic_file(path, force) as temporary:
            temporary.write_bytes(new)
            if fails:
                raise RuntimeError
            done = True
    except (RuntimeError, OutputExists):
        pass
    assert done == (not fails and (force or old is None))
    assert (path.read_bytes() if path.exists() else None) == (new if done else old)
    assert len(os.listdir(path.parent)) == path.exists()


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path):
    program = "import os, sys, export.atomic as a\nwith a.atomic_folder(sys.argv[1]): os.kill(os.getpid(), 9)"
    out = tmp_path / "a[b]*"
    assert subprocess.run([sys.executable, "-c", program, str(out)], check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    with atomic_folder(tmp_path / "other"):
        assert left.exists()
    with atomic_folder(out) as first:
        assert not left.exists()
        with atomic_folder(out, force=True):
            assert first.exists()
        first.rename(tmp_path / "kept")
        first.mkdir()
        out.rmdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a[b]*", "kept", "other"]
